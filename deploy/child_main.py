"""A service started by `busway serve`: like `busway gateway|router|worker`, with all settings in the environment.

Leaving the command line out makes each start a tenth of a second shorter.
"""

import os
import sys

from deploy.errors import CommandError
from deploy.service import SERVE, run_service
from deploy.settings import resolve


def main() -> None:
    """Run the service that the first argument names; the others are for whoever reads `ps`."""
    service = sys.argv[1]
    try:
        run_service(resolve(toml={}, environ=os.environ, flags={}), next(name for name in SERVE if name == service))
    except CommandError as error:
        print(f"busway: {error}", file=sys.stderr)
        sys.exit(error.exit_code)


if __name__ == "__main__":
    main()
