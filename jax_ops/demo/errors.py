"""The one exception of the demo."""


class DemoError(Exception):
    """What the user can mend: a missing package, an unusable file, a bad argument. The message says how."""
