"""A child process whose module starts a thread as it is imported, with which it cannot be a fork."""

import threading
import time

from tests import busy_child

threading.Thread(target=time.sleep, args=(60,), name="at import", daemon=True).start()
main = busy_child.main

if __name__ == "__main__":
    main()
