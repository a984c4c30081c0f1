//! Checks of error objects.

use serde_json::Value;

/// Checks an error object, and that it reveals no internals. Returns `param` and `code`.
#[track_caller]
pub fn check_error(value: &Value) -> (Option<String>, Option<String>) {
    let names: Vec<&String> = value.as_object().unwrap().keys().collect();
    assert_eq!(names, ["error"], "{value}");
    let mut names: Vec<&String> = value["error"].as_object().unwrap().keys().collect();
    names.sort();
    assert_eq!(names, ["code", "message", "param", "type"], "{value}");
    let message = value["error"]["message"].as_str().unwrap();
    assert!(!message.is_empty());
    for inside in ["0x", "/root", "/tmp", ".rs", "panicked", "backtrace", "unwrap"] {
        assert!(!message.contains(inside), "{message:?} reveals {inside:?}");
    }
    let word = |name: &str| value["error"][name].as_str().map(str::to_owned);
    (word("param"), word("code"))
}
