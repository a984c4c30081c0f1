//! A reader of server-sent events.

use std::io::BufReader;
use std::net::TcpStream;

use serde_json::Value;

use super::read_chunk;

/// Reads server-sent events.
pub struct Stream {
    reader: BufReader<TcpStream>,
    is_over: bool,
    rest: String,
}

impl Stream {
    /// Reads the body that follows the headers in `reader`.
    pub fn new(reader: BufReader<TcpStream>) -> Stream {
        Stream { reader, is_over: false, rest: String::new() }
    }

    /// Returns the data of the next event; `None` when the stream has ended.
    pub fn next_data(&mut self) -> Option<String> {
        loop {
            if let Some((event, rest)) = self.rest.split_once("\n\n") {
                let event = event.to_owned();
                self.rest = rest.to_owned();
                match event.strip_prefix("data: ") {
                    Some(data) => return Some(data.to_owned()),
                    None => assert!(event.starts_with(':'), "{event:?}"),
                }
            } else if self.is_over {
                assert_eq!(self.rest, "", "half an event");
                return None;
            } else {
                match read_chunk(&mut self.reader) {
                    Some(chunk) => self.rest += std::str::from_utf8(&chunk).expect("whole characters"),
                    None => self.is_over = true,
                }
            }
        }
    }

    /// Returns the data of all remaining events.
    pub fn all(mut self) -> Vec<String> {
        std::iter::from_fn(|| self.next_data()).collect()
    }

    /// Returns the remaining chunks of a stream that ends with `[DONE]`.
    #[track_caller]
    pub fn chunks(self) -> Vec<Value> {
        let mut data = self.all();
        assert_eq!(data.pop().as_deref(), Some("[DONE]"), "{data:?}");
        data.iter().map(|data| serde_json::from_str(data).unwrap()).collect()
    }
}
