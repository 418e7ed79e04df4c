"""The pages that people see: what their runs learn, what waits, what models say, and what is on the disk.

Nothing else of the server knows of them. They ask the stores, and change only what the routes of the API change too.
"""
