from hetjax import extras

extras.require("absl", "ml_collections")
