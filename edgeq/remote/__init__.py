"""Work with boards over SSH: find them by address or name, check them, send missing files, and measure on them."""
