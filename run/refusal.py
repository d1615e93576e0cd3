"""What the rules of a configuration share (rules.py, and each kind of training)."""

from run.config import ConfigError, RunConfig, flag_name


def refuse(config: RunConfig, field: str, rule: str):
    """Raises ConfigError: the field's flag, its value, and a rule that says what would fit."""
    value = getattr(config, field)
    words = [flag_name(field)]
    if isinstance(value, list):
        words += map(str, value)
    elif value is not True:
        words.append(str(value))
    raise ConfigError(f"{' '.join(words)}: {rule}")


def multiples(n: int, of: int) -> str:
    """The multiples next to n, for a message."""
    low = n // of * of
    return f"{low} or {low + of} would fit" if low else f"{of} would fit"
