"""Never ends, and does not listen to SIGTERM; tells the test which run it belongs to."""

import os
import signal
import sys
import time
from pathlib import Path

from tests.distributed.launch import FOLDER

signal.signal(signal.SIGTERM, signal.SIG_IGN)
Path(sys.argv[1]).write_text(os.environ[FOLDER])


def planted_hang():
    time.sleep(3600)


planted_hang()
