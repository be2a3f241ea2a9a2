"""Engine arguments as the flags of an engine's own command line. Pure."""

from collections.abc import Mapping


def flags(args: Mapping[str, str]) -> list[str]:
    """Return key=value pairs as words; a value of true is a switch."""
    words: list[str] = []
    for key, value in args.items():
        words.append("--" + key.replace("_", "-"))
        if value.lower() != "true":
            words.append(value)
    return words
