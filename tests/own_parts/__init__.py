"""Parts of one's own, one file each, as a user would write them."""
