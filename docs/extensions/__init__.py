"""What the site makes while it is built: links out of `docs/`, and the pages that are generated."""
