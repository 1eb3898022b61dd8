"""Shapes and types of everything under stepladder.objectives are checked on every call these tests make."""

import sys

from jaxtyping import install_import_hook

# Another test may have imported the package without the checks; it keeps its copy, these tests get a
# checked one.
for module in [name for name in sys.modules if name.split(".")[:2] == ["stepladder", "objectives"]]:
    del sys.modules[module]
install_import_hook("stepladder.objectives", "maths_typecheck.checked")
