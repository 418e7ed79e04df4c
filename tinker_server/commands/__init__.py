"""Commands for operators beside serving: status, doctor, backup, restore."""
