"""The SQL, as methods with domain names; knows nothing of HTTP.

- `database`, `postgresql`, `outage`, `lease`: connections, their errors, and the only server of a database.
- `reading`: connections of commands that change nothing.
- `tables`, `records`: the tables, and the frozen values that the methods return.
- `futures`: operations and their results, in order and durable; the replay log of each model.
- `sessions`, `runs`, `samplers`: clients, their training runs and their sampling sessions.
- `own_layout`: base models whose runs and weights have the LoRA layout `own`.
- `catalog`, `run_search`, `notes`: lists by page, search by words, and what clients noted of the entries.
- `run_metrics`, `run_groups`: latest values, trends and groups of the table of runs.
- `steps`, `client_metrics`, `usage`, `machine_history`: curves of runs, metrics of clients, use, load of the machine.
- `checkpoints`, `directories`, `uploads`: saved weights by name, their directories, and files on their way in.
- `holdings`, `disk_account`: limits on an owner's models and part of the disk.
- `audit`, `last_backup`: changes of saved weights and of projects; the time of the last backup.
"""
