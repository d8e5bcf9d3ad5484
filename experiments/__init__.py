"""The commands. Modules of a user's own in a directory of this name are found, too."""

import pkgutil

from hetjax import extras

extras.require("absl", "ml_collections")
__path__ = pkgutil.extend_path(__path__, __name__)
