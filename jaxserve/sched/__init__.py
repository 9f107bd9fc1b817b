"""Who runs next: requests, blocks, rows. Standard library and numpy only."""
