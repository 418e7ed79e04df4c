"""Commands for operators beside serving: status, admin, doctor, join, leave, backup, restore."""
