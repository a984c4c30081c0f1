//! Stored responses in a SQLite file, so that they outlive the process.
//!
//! Memory stays the place where responses are found: the file is read once, at start, and then repeats every change of
//! the store on a thread of its own. An error of the file is written to the log, and the server goes on without it.
//!
//! The file is untrusted input: its schema must be the one below, to the letter (no triggers, no views), every text is
//! parsed before the server listens, and a file of another program or a damaged one is refused.

use std::collections::HashMap;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::mpsc::{Receiver, SyncSender, TrySendError, sync_channel};
use std::thread::JoinHandle;

use rusqlite::config::DbConfig;
use rusqlite::{Connection, ErrorCode, OptionalExtension, Transaction, params};

use super::store::{StoredItem, StoredResponse, Turn};
use crate::http::json::Json;

/// Marks files of this kind: `PLCD` in ASCII.
const APPLICATION_ID: i32 = 0x504c_4344;
/// Version of the schema below.
const SCHEMA_VERSION: i32 = 1;
/// Responses, and the items that each added to its conversation. A turn is kept while a response or a later turn needs
/// it.
const SCHEMA: [&str; 5] = [
    "CREATE TABLE turns (key INTEGER PRIMARY KEY, previous INTEGER, num_input INTEGER NOT NULL, items TEXT NOT NULL) \
     STRICT",
    "CREATE TABLE responses (number INTEGER PRIMARY KEY, tenant TEXT NOT NULL, id TEXT NOT NULL, turn INTEGER NOT NULL, \
     before TEXT NOT NULL, after TEXT NOT NULL) STRICT",
    "CREATE INDEX turns_by_previous ON turns (previous)",
    "CREATE INDEX responses_by_turn ON responses (turn)",
    "CREATE INDEX responses_by_id ON responses (id)",
];
/// Maximum changes that wait to be written. Further ones are lost, with a line in the log.
const MAX_CHANGES: usize = 4096;
/// Maximum changes of one transaction.
const MAX_BATCH: usize = 256;

/// A file of stored responses that was opened and checked.
#[derive(Debug)]
pub struct ResponseDatabase {
    connection: Connection,
    pub(super) saved: Saved,
}

/// The content of a file.
#[derive(Debug, Default)]
pub(super) struct Saved {
    /// Responses in the order in which they were stored.
    pub(super) responses: Vec<SavedResponse>,
    pub(super) turns: HashMap<u64, SavedTurn>,
}

#[derive(Debug)]
pub(super) struct SavedResponse {
    pub(super) tenant: String,
    pub(super) id: String,
    /// Keys of the turns of its conversation, its own last.
    pub(super) turns: Vec<u64>,
    pub(super) before: String,
    pub(super) after: String,
}

#[derive(Debug)]
pub(super) struct SavedTurn {
    previous: Option<u64>,
    pub(super) num_input: usize,
    pub(super) items: Vec<StoredItem>,
}

/// A change of the store.
enum Change {
    Insert { tenant: Arc<str>, id: String, response: Arc<StoredResponse> },
    Remove { tenant: Arc<str>, id: String },
}

/// Passes changes on to the thread that writes them.
#[derive(Debug, Clone)]
pub(super) struct Journal(SyncSender<Change>);

/// The thread that writes changes. Dropping it waits until all are written.
#[derive(Debug)]
pub(super) struct Writer {
    pub(super) journal: Option<Journal>,
    thread: Option<JoinHandle<()>>,
}

impl ResponseDatabase {
    /// Opens a file, or makes one that only its owner can read. An error says what is wrong with the file.
    pub fn open(path: &Path) -> Result<ResponseDatabase, String> {
        let shown = path.display();
        create_private(path).map_err(|error| format!("{shown}: cannot be opened: {error}"))?;
        let explain = |error: rusqlite::Error| match error.sqlite_error_code() {
            Some(ErrorCode::NotADatabase) => format!("{shown}: this is not a SQLite database; choose another file"),
            Some(ErrorCode::DatabaseBusy | ErrorCode::DatabaseLocked) => {
                format!("{shown}: another process uses this file; a server needs one of its own")
            }
            Some(ErrorCode::DatabaseCorrupt) => {
                format!("{shown}: the file is damaged ({error}); remove it or restore it")
            }
            _ => format!("{shown}: {error}"),
        };
        let connection = prepare(path).map_err(explain)?;
        check_schema(&connection).map_err(explain)?.map_err(|reason| format!("{shown}: {reason}"))?;
        let damaged = |reason: String| format!("{shown}: the file is damaged: {reason}; remove it or restore it");
        let saved = read(&connection).map_err(explain)?.map_err(damaged)?;
        Ok(ResponseDatabase { connection, saved })
    }

    /// Starts the thread that writes changes.
    pub(super) fn start(self) -> std::io::Result<Writer> {
        let (sender, changes) = sync_channel(MAX_CHANGES);
        let connection = self.connection;
        let thread = std::thread::Builder::new().name("responses".into());
        let thread = thread.spawn(move || write_all(connection, &changes))?;
        Ok(Writer { journal: Some(Journal(sender)), thread: Some(thread) })
    }
}

impl Drop for Writer {
    fn drop(&mut self) {
        self.journal = None;
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

impl Journal {
    pub(super) fn insert(&self, tenant: &Arc<str>, id: &str, response: &Arc<StoredResponse>) {
        self.send(Change::Insert { tenant: tenant.clone(), id: id.to_owned(), response: response.clone() });
    }

    pub(super) fn remove(&self, tenant: &Arc<str>, id: &str) {
        self.send(Change::Remove { tenant: tenant.clone(), id: id.to_owned() });
    }

    fn send(&self, change: Change) {
        match self.0.try_send(change) {
            Ok(()) => {}
            Err(TrySendError::Full(_)) => {
                tracing::warn!(
                    "the file of stored responses is too slow: a change of a response was not written to it"
                );
            }
            Err(TrySendError::Disconnected(_)) => {}
        }
    }
}

/// Makes the file if it does not exist.
fn create_private(path: &Path) -> std::io::Result<()> {
    let mut options = std::fs::OpenOptions::new();
    options.read(true).write(true).create(true).truncate(false);
    #[cfg(unix)]
    std::os::unix::fs::OpenOptionsExt::mode(&mut options, 0o600);
    if !options.open(path)?.metadata()?.is_file() {
        return Err(std::io::Error::other("this is not a regular file"));
    }
    Ok(())
}

/// Opens the file for this process alone.
fn prepare(path: &Path) -> rusqlite::Result<Connection> {
    let path: PathBuf = path.into();
    let connection = Connection::open(path)?;
    connection.set_db_config(DbConfig::SQLITE_DBCONFIG_DEFENSIVE, true)?;
    connection.set_db_config(DbConfig::SQLITE_DBCONFIG_TRUSTED_SCHEMA, false)?;
    connection.set_db_config(DbConfig::SQLITE_DBCONFIG_ENABLE_TRIGGER, false)?;
    connection.set_db_config(DbConfig::SQLITE_DBCONFIG_ENABLE_VIEW, false)?;
    connection.pragma_update(None, "cell_size_check", true)?;
    connection.pragma_update(None, "locking_mode", "exclusive")?;
    // Deleted responses are overwritten.
    connection.pragma_update(None, "secure_delete", true)?;
    connection.pragma_update(None, "journal_mode", "wal")?;
    connection.pragma_update(None, "synchronous", "normal")?;
    Ok(connection)
}

/// Makes the tables of an empty file, and checks those of any other.
fn check_schema(connection: &Connection) -> rusqlite::Result<Result<(), String>> {
    let number = |name: &str| connection.pragma_query_value(None, name, |row| row.get::<_, i32>(0));
    let mut statement = connection.prepare("SELECT sql FROM sqlite_schema ORDER BY rowid")?;
    let found: Vec<Option<String>> = statement.query_map([], |row| row.get(0))?.collect::<Result<_, _>>()?;
    if found.is_empty() && number("application_id")? == 0 && number("user_version")? == 0 {
        for sql in SCHEMA {
            connection.execute(sql, [])?;
        }
        connection.pragma_update(None, "application_id", APPLICATION_ID)?;
        connection.pragma_update(None, "user_version", SCHEMA_VERSION)?;
        return Ok(Ok(()));
    }
    if number("application_id")? != APPLICATION_ID {
        return Ok(Err("this is a database of another program; choose another file".into()));
    }
    let version = number("user_version")?;
    if version != SCHEMA_VERSION {
        let message = format!("the file has version {version}, but this program reads version {SCHEMA_VERSION}");
        return Ok(Err(message));
    }
    if !found.iter().map(Option::as_deref).eq(SCHEMA.map(Some)) {
        return Ok(Err("the file has other tables than this program makes; remove it or restore it".into()));
    }
    let checked: String = connection.pragma_query_value(None, "quick_check", |row| row.get(0))?;
    Ok(if checked == "ok" { Ok(()) } else { Err(format!("the file is damaged: {checked}; remove it or restore it")) })
}

/// Reads and checks all rows.
fn read(connection: &Connection) -> rusqlite::Result<Result<Saved, String>> {
    let mut saved = Saved::default();
    let mut statement = connection.prepare("SELECT key, previous, num_input, items FROM turns")?;
    let mut rows = statement.query([])?;
    while let Some(row) = rows.next()? {
        let (key, previous, num_input, items) = (row.get(0)?, row.get(1)?, row.get(2)?, row.get::<_, String>(3)?);
        match turn(key, previous, num_input, &items) {
            Ok((key, turn)) => drop(saved.turns.insert(key, turn)),
            Err(reason) => return Ok(Err(format!("turn {key}: {reason}"))),
        }
    }
    let mut statement = connection.prepare("SELECT tenant, id, turn, before, after FROM responses ORDER BY number")?;
    let mut rows = statement.query([])?;
    while let Some(row) = rows.next()? {
        let last: i64 = row.get(2)?;
        let mut response = SavedResponse {
            tenant: row.get(0)?,
            id: row.get(1)?,
            turns: Vec::new(),
            before: row.get(3)?,
            after: row.get(4)?,
        };
        if let Err(reason) = saved.complete(&mut response, last) {
            return Ok(Err(format!("response {:?}: {reason}", response.id)));
        }
        saved.responses.push(response);
    }
    Ok(Ok(saved))
}

/// Returns a turn whose items were checked.
fn turn(key: i64, previous: Option<i64>, num_input: i64, items: &str) -> Result<(u64, SavedTurn), String> {
    let positive = |key: i64| u64::try_from(key).map_err(|_| "a key is negative".to_owned());
    let items: Vec<(String, String)> = serde_json::from_str(items).map_err(|error| error.to_string())?;
    let num_input = usize::try_from(num_input).ok().filter(|count| *count <= items.len());
    let num_input = num_input.ok_or("more items of the input than items")?;
    let item = |(id, json): (String, String)| match Json::parse(json.as_bytes()) {
        Ok(Json::Object(_)) => Ok(StoredItem { id, json }),
        _ => Err(format!("the item {id:?} is not a JSON object")),
    };
    let items = items.into_iter().map(item).collect::<Result<_, _>>()?;
    Ok((positive(key)?, SavedTurn { previous: previous.map(positive).transpose()?, num_input, items }))
}

impl Saved {
    /// Returns the largest key of a turn.
    pub(super) fn last_key(&self) -> u64 {
        self.turns.keys().copied().max().unwrap_or(0)
    }

    /// Finds the turns of a response, and checks that its parts are JSON together.
    fn complete(&self, response: &mut SavedResponse, last: i64) -> Result<(), String> {
        let mut next = Some(u64::try_from(last).map_err(|_| "a key is negative")?);
        while let Some(key) = next {
            let turn = self.turns.get(&key).ok_or_else(|| format!("turn {key} is missing"))?;
            if response.turns.len() >= self.turns.len() {
                return Err("its conversation has no beginning".into());
            }
            response.turns.push(key);
            next = turn.previous;
        }
        response.turns.reverse();
        let own = &self.turns[response.turns.last().ok_or("it has no turn")?];
        let output: Vec<&str> = own.items[own.num_input..].iter().map(|item| item.json.as_str()).collect();
        let whole = [response.before.as_str(), &output.join(","), &response.after].concat();
        match serde_json::from_str::<serde_json::Value>(&whole) {
            Ok(value) if value["id"] == response.id.as_str() && value["object"] == "response" => Ok(()),
            _ => Err("its parts are not the JSON of a response".into()),
        }
    }
}

/// Writes changes until all journals are dropped. Errors are logged, the first of each series.
fn write_all(mut connection: Connection, changes: &Receiver<Change>) {
    let mut is_failing = false;
    while let Ok(first) = changes.recv() {
        let batch: Vec<Change> = std::iter::once(first).chain(changes.try_iter().take(MAX_BATCH - 1)).collect();
        match write_batch(&mut connection, &batch) {
            Ok(()) if is_failing => {
                is_failing = false;
                tracing::info!("stored responses are written to their file again");
            }
            Ok(()) => {}
            Err(error) => {
                if !is_failing {
                    tracing::error!(
                        "stored responses cannot be written to their file, and stay in memory only: {error}"
                    );
                }
                is_failing = true;
            }
        }
    }
}

fn write_batch(connection: &mut Connection, batch: &[Change]) -> rusqlite::Result<()> {
    let transaction = connection.transaction()?;
    for change in batch {
        match change {
            Change::Insert { tenant, id, response } => insert(&transaction, tenant, id, response)?,
            Change::Remove { tenant, id } => remove(&transaction, tenant, id)?,
        }
    }
    transaction.commit()
}

fn insert(transaction: &Transaction<'_>, tenant: &str, id: &str, response: &StoredResponse) -> rusqlite::Result<()> {
    let mut has_turn = transaction.prepare("SELECT 1 FROM turns WHERE key = ?")?;
    let mut add_turn = transaction.prepare("INSERT INTO turns VALUES (?, ?, ?, ?)")?;
    let turns: &[Arc<Turn>] = response.turns();
    // Earlier turns are in the file, unless the response that added them was removed meanwhile.
    for (index, turn) in turns.iter().enumerate().rev() {
        if has_turn.exists(params![turn.key() as i64])? {
            break;
        }
        let previous = index.checked_sub(1).map(|index| turns[index].key() as i64);
        let items: Vec<(&str, &str)> = turn.items().iter().map(|item| (item.id.as_str(), item.json.as_str())).collect();
        let items = serde_json::to_string(&items).unwrap_or_default();
        add_turn.execute(params![turn.key() as i64, previous, turn.num_input() as i64, items])?;
    }
    let sql = "INSERT INTO responses (tenant, id, turn, before, after) VALUES (?, ?, ?, ?, ?)";
    let last = turns.last().map(|turn| turn.key() as i64);
    transaction.prepare(sql)?.execute(params![tenant, id, last, response.before(), response.after()])?;
    Ok(())
}

/// Removes a response, and the turns that only it needed.
fn remove(transaction: &Transaction<'_>, tenant: &str, id: &str) -> rusqlite::Result<()> {
    let sql = "DELETE FROM responses WHERE tenant = ? AND id = ? RETURNING turn";
    let mut removed = transaction.prepare(sql)?;
    let mut next: Option<i64> = removed.query_row(params![tenant, id], |row| row.get(0)).optional()?;
    let sql = "DELETE FROM turns WHERE key = ?1 AND NOT EXISTS (SELECT 1 FROM responses WHERE turn = ?1) \
               AND NOT EXISTS (SELECT 1 FROM turns WHERE previous = ?1) RETURNING previous";
    let mut remove_turn = transaction.prepare(sql)?;
    while let Some(key) = next {
        next = remove_turn.query_row(params![key], |row| row.get(0)).optional()?.flatten();
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::limits::shared_tenants::SharedTenants;
    use crate::limits::tenants::Tenants;
    use crate::responses::store::{Found, NewResponse, ResponseStore};

    #[test]
    fn an_error_of_the_file_does_not_stop_the_store() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("file");
        let database = ResponseDatabase::open(&path).unwrap();
        database.connection.execute("DROP TABLE turns", []).unwrap();
        let tenants = SharedTenants::from(Tenants::open());
        let tenant = tenants.current().anonymous();
        let store = ResponseStore::new(1 << 20, 1, Default::default()).with_database(database, &tenants);
        for id in ["resp_1", "resp_2"] {
            let item = StoredItem { id: format!("in_{id}"), json: "{}".into() };
            let new = NewResponse { input: vec![item], ..NewResponse::default() };
            assert!(store.insert(&tenant, id, new).is_some());
            assert!(matches!(store.find(&tenant, id), Some(Found::Stored(_))));
        }
        assert!(store.remove(&tenant, "resp_1") && store.find(&tenant, "resp_1").is_none());
        drop(store);
        assert!(ResponseDatabase::open(&path).unwrap_err().contains("other tables"));
    }
}
