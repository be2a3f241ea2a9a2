"""Discovery: `register` puts a service into the fleet, `watch` shows who lives in it."""

from bus.fleet import Fleet, watch
from bus.registration import Registration, TakenOverError, register

__all__ = ["Fleet", "Registration", "TakenOverError", "register", "watch"]
