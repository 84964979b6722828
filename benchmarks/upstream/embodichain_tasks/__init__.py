"""A stand-in for EmbodiChain's package of tasks; see ``embodichain``."""

import embodichain  # noqa: F401  # it finds the modules of both
