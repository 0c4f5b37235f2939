"""Work with boards over SSH: find them by address or name, check them, send files to them, and measure on them.

`open_board` takes the lock of one board and gives a session. Each job on a board has its own file. What a board answers
is untrusted: every answer is parsed against a type and held to limits.
"""
