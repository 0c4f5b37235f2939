"""Work with boards over SSH: find them by address or name, check them, send files to them, and measure on them."""
