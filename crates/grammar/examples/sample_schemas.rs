//! Samples replies for JSON schemas at random, for a validator outside this project.
//!
//! Reads one schema a line from standard input; writes one line for each: `{"refused": "why"}`, or `{"replies": [...]}`
//! with the texts of the replies that ended. The argument is the number of replies for each schema.
#![allow(clippy::print_stdout)]

#[path = "../tests/common/mod.rs"]
mod common;

use std::io::BufRead;

use pellucid_grammar::GrammarSource;
use serde_json::{Value, json};

fn main() {
    let num_replies: u64 = std::env::args().nth(1).and_then(|text| text.parse().ok()).unwrap_or(10);
    for line in std::io::stdin().lock().lines() {
        let line = line.expect("a line of text");
        let schema: Value = serde_json::from_str(&line).expect("a JSON value on each line");
        let answer = match common::compile(GrammarSource::JsonSchema(schema)) {
            Err(error) => json!({ "refused": error.to_string() }),
            Ok(grammar) => {
                let replies = (0..num_replies).map(|seed| common::sample(&grammar, &mut common::Random(seed), 200));
                let complete: Vec<String> = replies.filter(|reply| reply.is_complete).map(|reply| reply.text).collect();
                json!({ "replies": complete })
            }
        };
        println!("{answer}");
    }
}
