//! A stored response is shown with the bytes of the reply that made it.

use crate::support::{Response, Server, Setup};
use pellucid_testing::TinyModel;
use serde_json::{Value, json};

const PATH: &str = "/v1/responses";

/// Creates a response with `fields` beside the model and the input.
fn create(server: &Server, fields: &Value) -> Response {
    let mut body = json!({ "model": "tiny", "input": "hello", "max_output_tokens": 100 });
    body.as_object_mut().unwrap().extend(fields.as_object().unwrap().clone());
    server.post(PATH, &body.to_string())
}

fn shown(server: &Server, reply: &Value) -> Response {
    server.get(&format!("{PATH}/{}", reply["id"].as_str().unwrap()))
}

/// The reply and the store share one text, apart from log probabilities, which are not stored.
#[test]
fn a_stored_response_is_shown_with_the_bytes_of_its_reply() {
    // A vocabulary that can spell a call.
    let tiny = TinyModel { has_brackets: true, ..TinyModel::default() };
    let server = Server::with(Setup { tiny, context_len: 2048, ..Setup::default() });
    let tool = json!({ "type": "function", "name": "f",
        "parameters": { "type": "object", "properties": {}, "additionalProperties": false } });
    for fields in [
        json!({}),
        // Longer than a step in which JSON is written.
        json!({ "metadata": { "a": "é".repeat(500), "b": "é".repeat(500), "c": "é".repeat(500), "d": "é".repeat(500),
            "e": "é".repeat(500), "f": "é".repeat(500), "g": "é".repeat(500), "h": "é".repeat(500) } }),
        json!({ "tools": [tool], "tool_choice": "required", "seed": 3 }),
    ] {
        let reply = create(&server, &fields);
        assert_eq!(reply.ok()["store"], true);
        assert_eq!(shown(&server, &reply.ok()).text(), reply.text(), "{fields}");
    }
    let reply = create(&server, &json!({ "include": ["message.output_text.logprobs"] }));
    let (mut whole, stored) = (reply.ok(), shown(&server, &reply.ok()).ok());
    assert_ne!(whole, stored);
    whole["output"][0]["content"][0]["logprobs"] = json!([]);
    assert_eq!(whole, stored);
}
