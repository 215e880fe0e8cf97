"""Takes away files and batches' rows whose time is over, and bytes that no row names. A part of the
sweeper."""

import logging
import time

from jobs import files, retention
from jobs.database import Database
from jobs.file_store import FileStore
from jobs.settings import Settings

EXPIRE_EVERY_S = 10.0
MOST_ROUNDS = 20  # of one sweep: other batches wait meanwhile
STRAYS_EVERY_S = 600.0

logger = logging.getLogger(__name__)


class FileSweeper:
    """Any number may work on one folder: what is gone already is gone."""

    def __init__(self, settings: Settings, database: Database) -> None:
        self._store = FileStore(settings.files_dir)
        self._database = database
        self._expire_due = 0.0
        self._strays_due = 0.0

    def sweep(self) -> None:
        """What is due. Raises what the database raises; a folder that cannot be read is logged."""
        now = time.monotonic()
        try:
            if now >= self._expire_due:
                self.expire()
                is_done = self.empty_batches()
                self._expire_due = now + (EXPIRE_EVERY_S if is_done else 0.0)
            if now >= self._strays_due:
                self.remove_strays()
                self._strays_due = now + STRAYS_EVERY_S
        except OSError as error:
            logger.warning("files not swept: %s", error.strerror)
            self._expire_due = self._strays_due = now + STRAYS_EVERY_S

    def expire(self) -> int:
        with self._database.begin() as connection:
            ids = files.expire(connection, self._database.clock(connection))
        for file_id in ids:
            self._store.remove(file_id)
        if ids:
            logger.info("%d files expired", len(ids))
        return len(ids)

    def empty_batches(self) -> bool:
        """Delete rows of batches that are over, some at a time; whether all of them are gone."""
        for _ in range(MOST_ROUNDS):
            with self._database.begin() as connection:
                emptied = retention.empty_one(connection, self._database.clock(connection))
            if emptied is None:
                return True
            for file_id in emptied.file_ids:
                self._store.remove(file_id)
            if emptied.is_done:
                logger.info("batch %s emptied: its time was over", emptied.batch_id)
        return False

    def remove_strays(self) -> int:
        """What uploads and deletions that died have left."""
        num = self._store.remove_temporary()
        old = self._store.old_ids()
        with self._database.read() as connection:
            strays = set(old) - files.known(connection, old)
        for file_id in strays:
            self._store.remove(file_id)
        if num + len(strays):
            logger.info("%d stray files removed", num + len(strays))
        return num + len(strays)
