//! A request's body. Our parser accepts only what `serde_json` accepts, with equal values, also when these are
//! written and read again, and refuses with a message that fits on a screen.

#![no_main]

use libfuzzer_sys::fuzz_target;
use serde_json::Value;

fuzz_target!(|data: &[u8]| {
    let ours = pellucid_server::fuzzing::parse_json(data);
    let theirs: Result<Value, _> = serde_json::from_slice(data);
    match (&ours, &theirs) {
        (Ok(ours), Ok(theirs)) => {
            assert_eq!(ours, theirs);
            // Not with the values before: reading rounds the last digit of some numbers.
            let written = ours.to_string();
            let again = pellucid_server::fuzzing::parse_json(written.as_bytes());
            assert_eq!(again.ok(), serde_json::from_str(&written).ok(), "{written}");
        }
        (Ok(ours), Err(error)) => panic!("accepted {ours}, which is not JSON: {error}"),
        (Err(message), _) => assert!(message.len() <= 512, "{message}"),
    }
});
