//! A keys file. Neither the error of a refused file nor the `Debug` output of an accepted one shows a key.

#![no_main]

use libfuzzer_sys::fuzz_target;
use pellucid_server::{KeysFile, Tenants};

/// A text that the seeds have in place of keys; no message of ours contains it.
const KEY: &str = "q8Zk-SECRET-x7";

fuzz_target!(|data: &[u8]| {
    let Ok(text) = std::str::from_utf8(data) else { return };
    let file = match KeysFile::parse(text) {
        Ok(file) => file,
        Err(error) => {
            assert!(!error.to_string().contains(KEY) && !format!("{error:?}").contains(KEY), "{error:?}");
            return;
        }
    };
    // Names of tenants are shown.
    let in_name = file.tenant.iter().any(|tenant| tenant.name.contains(KEY));
    let shown = format!("{file:?}");
    assert!(in_name || !shown.contains(KEY), "{shown}");
    match Tenants::new(file.tenant) {
        Ok(tenants) => {
            assert!(tenants.has_keys());
            assert!(in_name || !format!("{tenants:?}").contains(KEY), "{tenants:?}");
        }
        Err(error) => assert!(in_name || !format!("{error} {error:?}").contains(KEY), "{error:?}"),
    }
});
