"""Bad input against the built program: what the tests inside the server cannot show. The table of rows is in crates/server/tests."""
