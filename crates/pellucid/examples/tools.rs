//! A loop in which the model calls a tool, gets its result and goes on, until it answers without a call.
//!
//! `cargo run -p pellucid --example tools [MODEL]`

use std::error::Error;

use pellucid::{Message, Pellucid, Request, Tool, ToolCall, ToolChoice};
use serde_json::json;

/// The tiny model of this crate, which writes stories for small children. It knows no tools, so it is told to call one.
const TINY: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/models/tiny.gguf");

/// Maximum replies of one conversation.
const MAX_ROUNDS: usize = 6;

fn main() -> Result<(), Box<dyn Error>> {
    let path = std::env::args().nth(1).unwrap_or_else(|| TINY.to_owned());
    let must_call = path == TINY;
    let model = Pellucid::open(path)?;

    let add = Tool::new(
        "add",
        "Adds two integers.",
        json!({
            "type": "object",
            "properties": {
                "a": { "type": "integer", "minimum": 0, "maximum": 9999 },
                "b": { "type": "integer", "minimum": 0, "maximum": 9999 },
            },
            "required": ["a", "b"],
            "additionalProperties": false,
        }),
    );
    let mut messages = vec![Message::user("What is 1234 + 4321? Use the tool.")];
    println!("> {}", messages[0].content);
    for round in 0..MAX_ROUNDS {
        let choice = if must_call && round == 0 { ToolChoice::Required } else { ToolChoice::Auto };
        let request = Request::messages(messages.clone()).tools([add.clone()]).tool_choice(choice);
        let reply = model.generate(request.parallel_calls(false).max_tokens(300))?;
        if !reply.text().is_empty() {
            println!("{reply}");
        }
        if reply.calls().is_empty() {
            break;
        }
        messages.push(Message::from(&reply));
        for call in reply.calls() {
            let result = run(call);
            println!("[{}({}) returned {result}]", call.name, json!(call.arguments));
            messages.push(Message::result(call, result));
        }
    }
    Ok(())
}

/// Runs a call. Its arguments satisfy the schema, so both are there and are integers.
fn run(call: &ToolCall) -> String {
    let number = |name: &str| call.arguments[name].as_i64().unwrap_or_default();
    (number("a") + number("b")).to_string()
}
