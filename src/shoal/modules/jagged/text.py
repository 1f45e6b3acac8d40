"""How the tensors print."""


def show(instance: object, **parts: object) -> str:
    """The class and its parts, a line each."""
    lines = [f"    {name}={part!r},\n" for name, part in parts.items()]
    return f"{type(instance).__name__}(\n{''.join(lines)})"
