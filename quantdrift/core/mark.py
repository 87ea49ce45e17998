"""The header that marks what quantdrift itself asks a candidate again: nobody captures it, whatever its value."""

from typing import Final

MARK: Final = "x-quantdrift-recheck"
