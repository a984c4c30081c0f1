//! Stored responses in a file: they outlive the server, stay within their bounds, and strange files are refused.

use std::path::Path;

use crate::support::{Server, Setup, tenant};
use pellucid_server::ResponseDatabase;
use rusqlite::Connection;
use serde_json::{Value, json};

const PATH: &str = "/v1/responses";
const KEYS: [(&str, &str); 2] = [("Content-Type", "application/json"), ("Authorization", "Bearer key-of-a")];

/// Starts a server with a file, and a tenant that may store `max_responses`.
fn start(path: &Path, max_responses: u32) -> Server {
    let mut a = tenant("a", "key-of-a");
    a.stored_responses = Some(max_responses);
    let tenants = vec![a, tenant("b", "key-of-b")];
    Server::with(Setup { tenants, responses_db: Some(path.into()), ..Setup::default() })
}

fn create(server: &Server, fields: Value) -> Value {
    let mut body = json!({ "model": "tiny", "max_output_tokens": 8, "input": "hello", "temperature": 0 });
    body.as_object_mut().unwrap().extend(fields.as_object().unwrap().clone());
    server.request("POST", PATH, &KEYS, body.to_string().as_bytes()).ok()
}

fn id(response: &Value) -> &str {
    response["id"].as_str().unwrap()
}

fn count(path: &Path, table: &str) -> i64 {
    let connection = Connection::open(path).unwrap();
    connection.query_row(&format!("SELECT count(*) FROM {table}"), [], |row| row.get(0)).unwrap()
}

#[test]
fn responses_outlive_the_server() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("responses.db");
    let server = start(&path, 100);
    let first = create(&server, json!({}));
    let second = create(&server, json!({ "input": "and then", "previous_response_id": id(&first) }));
    let gone = create(&server, json!({ "input": "other" }));
    let delete = |server: &Server, response: &Value| {
        server.request("DELETE", &format!("{PATH}/{}", id(response)), &KEYS, b"").ok();
    };
    delete(&server, &gone);
    // Its items stay: the second response continues it.
    delete(&server, &first);
    let continued = json!({ "input": "go on", "previous_response_id": id(&second), "store": false });
    let expected = create(&server, continued.clone());
    drop(server);
    assert_eq!((count(&path, "responses"), count(&path, "turns")), (1, 2));
    let server = start(&path, 100);
    let show = |response: &Value, headers: &[(&str, &str)]| {
        server.request("GET", &format!("{PATH}/{}", id(response)), headers, b"")
    };
    assert_eq!(show(&second, &KEYS).ok(), second);
    show(&second, &[("Authorization", "Bearer key-of-b")]).refused(404);
    show(&first, &KEYS).refused(404);
    show(&gone, &KEYS).refused(404);
    let found = create(&server, continued);
    assert_eq!(found["output"][0]["content"], expected["output"][0]["content"]);
    assert_eq!(found["usage"]["input_tokens"], expected["usage"]["input_tokens"]);
    delete(&server, &second);
    drop(server);
    assert_eq!((count(&path, "responses"), count(&path, "turns")), (0, 0));
    let mode = std::os::unix::fs::PermissionsExt::mode(&std::fs::metadata(&path).unwrap().permissions());
    assert_eq!(mode & 0o777, 0o600, "only the owner can read the file");
}

#[test]
fn the_file_stays_within_the_bounds_of_the_store() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("responses.db");
    let server = start(&path, 3);
    let all: Vec<Value> = (0..5).map(|i| create(&server, json!({ "input": format!("text {i}") }))).collect();
    drop(server);
    assert_eq!((count(&path, "responses"), count(&path, "turns")), (3, 3));
    // A lower limit applies at the next start, to the oldest first.
    let server = start(&path, 1);
    let status = |response| server.request("GET", &format!("{PATH}/{}", id(response)), &KEYS, b"").status;
    assert_eq!(all.iter().map(status).collect::<Vec<_>>(), [404, 404, 404, 404, 200]);
    drop(server);
    assert_eq!(count(&path, "responses"), 1);
}

#[test]
fn a_background_response_outlives_the_server_without_its_events() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("responses.db");
    let server = start(&path, 100);
    let created = create(&server, json!({ "background": true }));
    let file = path;
    let path = format!("{PATH}/{}", id(&created));
    let is_running = |server: &Server| server.request("GET", &path, &KEYS, b"").ok()["usage"].is_null();
    while is_running(&server) {
        std::thread::sleep(std::time::Duration::from_millis(10));
    }
    drop(server);
    let server = start(&file, 100);
    let response = server.request("GET", &path, &KEYS, b"").ok();
    assert_eq!((&response["background"], &response["usage"]["output_tokens"]), (&json!(true), &json!(8)));
    assert_eq!(server.request("POST", &format!("{path}/cancel"), &KEYS, b"").ok(), response);
    let stream = server.request("GET", &format!("{path}?stream=true"), &KEYS, b"");
    assert_eq!(stream.refused(400).0.as_deref(), Some("stream"));
}

#[test]
fn strange_files_are_refused_with_the_reason() {
    let folder = tempfile::tempdir().unwrap();
    let refused = |name: &str, reason: &str| {
        let error = ResponseDatabase::open(&folder.path().join(name)).unwrap_err();
        assert!(error.contains(name) && error.contains(reason), "{name}: {error}");
    };
    let file = |name: &str| folder.path().join(name);
    std::fs::write(file("text"), "this is not a database, but a text of some length".repeat(20)).unwrap();
    refused("text", "not a SQLite database");
    std::fs::create_dir(file("folder")).unwrap();
    refused("folder", "cannot be opened");
    refused("none/file", "cannot be opened");
    Connection::open(file("other")).unwrap().execute("CREATE TABLE a (b)", []).unwrap();
    refused("other", "another program");
    // Each of these begins as a good file with one response.
    let good = file("good");
    let server = start(&good, 100);
    create(&server, json!({}));
    drop(server);
    drop(ResponseDatabase::open(&good).unwrap());
    for (name, sql, reason) in [
        ("version", "PRAGMA user_version = 2", "version 2"),
        ("trigger", "CREATE TRIGGER t AFTER DELETE ON turns BEGIN DELETE FROM responses; END", "other tables"),
        ("view", "CREATE VIEW v AS SELECT 1", "other tables"),
        ("turn", "DELETE FROM turns", "turn 1 is missing"),
        ("loop", "UPDATE turns SET previous = key", "no beginning"),
        ("items", "UPDATE turns SET items = '[[\"a\", \"{\"]]'", "not a JSON object"),
        ("count", "UPDATE turns SET num_input = 3", "more items"),
        ("key", "UPDATE turns SET previous = -1", "negative"),
        ("json", "UPDATE responses SET after = '}'", "not the JSON of a response"),
        ("id", "UPDATE responses SET id = 'resp_other'", "not the JSON of a response"),
    ] {
        std::fs::copy(&good, file(name)).unwrap();
        Connection::open(file(name)).unwrap().execute_batch(sql).unwrap();
        refused(name, reason);
    }
    // Half of a file, and one with a damaged page.
    let bytes = std::fs::read(&good).unwrap();
    std::fs::write(file("half"), &bytes[..bytes.len() / 2]).unwrap();
    refused("half", "damaged");
    let mut bytes = bytes;
    let second = 4096..4096 + 100;
    bytes[second].fill(0xff);
    std::fs::write(file("damaged"), bytes).unwrap();
    refused("damaged", "damaged");
    // One server, one file.
    let _held = ResponseDatabase::open(&good).unwrap();
    refused("good", "another process");
}
