//! OpenAI's Responses API: the same texts as chat, events in the documented order, stored responses of each tenant,
//! refusals by name.

use crate::support::{Response, Server, Setup, tenant};
use pellucid_server::Limits;
use pellucid_testing::TinyModel;
use serde_json::{Value, json};

const PATH: &str = "/v1/responses";
const CHAT: &str = "/v1/chat/completions";

/// Returns a request with `fields`, which replace the default ones of the same name.
fn body(fields: Value) -> String {
    let mut body = json!({ "model": "tiny", "max_output_tokens": 8, "input": "hello" });
    body.as_object_mut().unwrap().extend(fields.as_object().unwrap().clone());
    body.to_string()
}

fn create(server: &Server, fields: Value) -> Value {
    server.post(PATH, &body(fields)).ok()
}

/// Returns the text of a chat with `fields`, which replace the default ones of the same name.
fn chat_text(server: &Server, fields: Value) -> Value {
    let mut body = json!({ "model": "tiny", "max_tokens": 8, "messages": [{ "role": "user", "content": "hello" }] });
    body.as_object_mut().unwrap().extend(fields.as_object().unwrap().clone());
    server.post(CHAT, &body.to_string()).ok()["choices"][0]["message"]["content"].clone()
}

/// Returns the text of a response whose only item is a message.
#[track_caller]
fn text(response: &Value) -> Value {
    assert_eq!(response["output"].as_array().unwrap().len(), 1, "{response}");
    assert_eq!(response["output"][0]["type"], "message");
    response["output"][0]["content"][0]["text"].clone()
}

/// Returns the events of a streamed response, whose names and numbers are checked.
fn events(server: &Server, mut fields: Value) -> Vec<Value> {
    fields["stream"] = json!(true);
    let response = server.post(PATH, &body(fields));
    assert_eq!(response.status, 200, "{}", response.text());
    assert_eq!(response.header("content-type"), Some("text/event-stream; charset=utf-8"));
    let event = |(i, event): (usize, &str)| {
        let (name, data) = event.split_once('\n').unwrap();
        let data: Value = serde_json::from_str(data.strip_prefix("data: ").unwrap()).unwrap();
        assert_eq!(data["type"], name.strip_prefix("event: ").unwrap());
        assert_eq!(data["sequence_number"], i);
        data
    };
    response.text().split_terminator("\n\n").enumerate().map(event).collect()
}

fn delete(server: &Server, id: &str, headers: &[(&str, &str)]) -> Response {
    server.request("DELETE", &format!("{PATH}/{id}"), headers, b"")
}

#[test]
fn a_response_has_the_text_of_a_chat() {
    let server = Server::start();
    for fields in [json!({ "seed": 7 }), json!({ "seed": 9, "temperature": 0.5, "top_k": 20, "top_p": 0.9 })] {
        let response = create(&server, fields.clone());
        assert_eq!(text(&response), chat_text(&server, fields.clone()));
        assert_eq!((&response["object"], &response["status"]), (&json!("response"), &json!("incomplete")));
        assert_eq!(response["incomplete_details"], json!({ "reason": "max_output_tokens" }));
        assert_eq!(response["output"][0]["status"], "incomplete");
        let usage = &response["usage"];
        assert_eq!(usage["output_tokens"], 8);
        assert_eq!(usage["total_tokens"].as_u64().unwrap(), usage["input_tokens"].as_u64().unwrap() + 8);
        assert_eq!(response["pellucid"]["seed"], fields["seed"]);
    }
    let response = create(&server, json!({ "temperature": 0.5, "metadata": { "a": "b" }, "user": "u" }));
    assert_eq!((&response["temperature"], &response["top_p"]), (&json!(0.5), &json!(1.0)));
    assert_eq!((&response["metadata"], &response["user"]), (&json!({ "a": "b" }), &json!("u")));
    assert_eq!(response["tool_choice"], "auto");
    assert_eq!(response["text"], json!({ "format": { "type": "text" }, "verbosity": "medium" }));
}

#[test]
fn items_are_rendered_like_the_messages_of_a_chat() {
    let server = Server::start();
    let part = |kind: &str, text: &str| json!({ "type": kind, "text": text });
    let input = json!([
        { "role": "developer", "content": "Be kind." },
        { "type": "message", "role": "user", "content": [part("input_text", "hello"), part("input_text", "there")] },
        { "type": "message", "id": "msg_1", "status": "completed", "role": "assistant", "content": [
            { "type": "output_text", "text": "hi", "annotations": [], "logprobs": [] }] },
        { "role": "user", "content": "what is it" }]);
    let messages = json!([
        { "role": "system", "content": "Be brief." },
        { "role": "developer", "content": "Be kind." },
        { "role": "user", "content": "hello\nthere" },
        { "role": "assistant", "content": "hi" },
        { "role": "user", "content": "what is it" }]);
    let asked = json!({ "temperature": 0, "instructions": "Be brief.", "input": input });
    let response = create(&server, asked.clone());
    assert_eq!(text(&response), chat_text(&server, json!({ "temperature": 0, "messages": messages })));
    assert_eq!(response["instructions"], "Be brief.");
    let count = json!({ "model": "tiny", "instructions": "Be brief.", "input": asked["input"] });
    let count = server.post("/v1/responses/input_tokens", &count.to_string()).ok();
    assert_eq!(count, json!({ "object": "response.input_tokens", "input_tokens": response["usage"]["input_tokens"] }));
}

#[test]
fn events_come_in_the_documented_order_and_join_to_the_response() {
    let server = Server::start();
    for fields in [
        json!({ "seed": 7 }),
        json!({ "seed": 9, "max_output_tokens": 40, "stop": ["e", "Q"], "stream_options": { "include_obfuscation": false } }),
    ] {
        let mut plain = fields.clone();
        plain.as_object_mut().unwrap().remove("stream_options");
        let whole = create(&server, plain);
        let events = events(&server, fields.clone());
        let names: Vec<&str> = events.iter().map(|event| event["type"].as_str().unwrap()).collect();
        let num_deltas = names.iter().filter(|name| **name == "response.output_text.delta").count();
        let last = format!("response.{}", whole["status"].as_str().unwrap());
        let mut expected = vec![
            "response.created",
            "response.in_progress",
            "response.output_item.added",
            "response.content_part.added",
        ];
        expected.extend(vec!["response.output_text.delta"; num_deltas]);
        let done = ["response.output_text.done", "response.content_part.done", "response.output_item.done", &last];
        expected.extend(done);
        assert_eq!(names, expected);
        let joined: String = events
            .iter()
            .filter(|event| event["type"] == "response.output_text.delta")
            .map(|event| event["delta"].as_str().unwrap())
            .collect();
        assert_eq!(text(&whole), joined);
        let is_padded = events.iter().any(|event| event["obfuscation"].is_string());
        assert_eq!(is_padded, fields["stream_options"].is_null());
        // The events at the end repeat the text and the item.
        let [text_done, part_done, item_done, completed] = events.last_chunk().unwrap();
        let item = &completed["response"]["output"][0];
        assert_eq!(text_done["text"], joined);
        assert_eq!((&part_done["part"], &item_done["item"]), (&item["content"][0], item));
        assert_eq!(text_done["item_id"], item["id"]);
        let added = &events[2]["item"];
        assert_eq!((&added["id"], &added["status"]), (&item["id"], &json!("in_progress")));
        // Without ids and times, the streamed response is the whole one.
        let mut shown = [completed["response"].clone(), whole.clone()];
        for response in &mut shown {
            for name in ["id", "created_at", "completed_at", "pellucid", "usage"] {
                response.as_object_mut().unwrap().remove(name);
            }
            response["output"][0]["id"] = Value::Null;
        }
        assert_eq!(shown[0], shown[1]);
        assert_eq!(completed["response"]["usage"]["output_tokens"], whole["usage"]["output_tokens"]);
        let created = &events[0]["response"];
        assert_eq!((&created["status"], &created["output"]), (&json!("in_progress"), &json!([])));
        assert_eq!((&created["id"], &created["usage"]), (&completed["response"]["id"], &Value::Null));
    }
}

#[test]
fn log_probabilities_are_those_of_a_chat() {
    let server = Server::start();
    let fields = json!({ "seed": 7, "top_logprobs": 2, "include": ["message.output_text.logprobs"] });
    let whole = create(&server, fields.clone());
    let chat = json!({ "model": "tiny", "max_tokens": 8, "seed": 7, "logprobs": true, "top_logprobs": 2,
        "messages": [{ "role": "user", "content": "hello" }] });
    let chat = server.post(CHAT, &chat.to_string()).ok();
    let expected = &chat["choices"][0]["logprobs"]["content"];
    assert_eq!(&whole["output"][0]["content"][0]["logprobs"], expected);
    let events = events(&server, fields);
    let deltas = events.iter().filter(|event| event["type"] == "response.output_text.delta");
    let joined: Vec<Value> = deltas.flat_map(|event| event["logprobs"].as_array().unwrap().clone()).collect();
    assert_eq!(&Value::Array(joined), expected);
    let done = events.iter().find(|event| event["type"] == "response.output_text.done").unwrap();
    assert_eq!(&done["logprobs"], expected);
    let plain = create(&server, json!({ "seed": 7 }));
    assert_eq!(plain["output"][0]["content"][0]["logprobs"], json!([]));
    // They are not stored.
    let stored = server.get(&format!("{PATH}/{}", whole["id"].as_str().unwrap())).ok();
    assert_eq!(stored["output"][0]["content"][0]["logprobs"], json!([]));
}

#[test]
fn a_schema_constrains_the_answer() {
    // A vocabulary that can spell JSON.
    let tiny = TinyModel { has_brackets: true, ..TinyModel::default() };
    let server = Server::with(Setup { tiny, ..Setup::default() });
    let schema = json!({ "type": "object", "properties": { "a": { "type": "boolean" } }, "required": ["a"],
        "additionalProperties": false });
    let format = json!({ "type": "json_schema", "name": "answer", "strict": true, "schema": schema });
    let response = create(&server, json!({ "max_output_tokens": 60, "seed": 3, "text": { "format": format } }));
    let answer: Value = serde_json::from_str(text(&response).as_str().unwrap()).unwrap();
    assert!(answer["a"].is_boolean(), "{answer}");
    assert_eq!(response["text"]["format"], format);
    assert_eq!(response["status"], "completed");
}

#[test]
fn a_stored_response_can_be_shown_continued_and_deleted() {
    let server = Server::start();
    let first = create(&server, json!({ "temperature": 0 }));
    let id = first["id"].as_str().unwrap();
    assert_eq!(first["store"], true);
    assert_eq!(server.get(&format!("{PATH}/{id}")).ok(), first);
    // Instructions are not carried over.
    let second = create(&server, json!({ "temperature": 0, "previous_response_id": id, "input": "and then" }));
    let messages = json!([
        { "role": "user", "content": "hello" },
        { "role": "assistant", "content": text(&first) },
        { "role": "user", "content": "and then" }]);
    assert_eq!(text(&second), chat_text(&server, json!({ "temperature": 0, "messages": messages })));
    assert_eq!(second["previous_response_id"], id);
    let second_id = second["id"].as_str().unwrap();
    let items = server.get(&format!("{PATH}/{second_id}/input_items?order=asc")).ok();
    let texts: Vec<&Value> = items["data"].as_array().unwrap().iter().map(|item| &item["content"][0]["text"]).collect();
    assert_eq!(texts, [&json!("hello"), &text(&first), &json!("and then")]);
    assert_eq!((&items["has_more"], &items["last_id"]), (&json!(false), &items["data"][2]["id"]));
    // Pages in both orders.
    let page = server.get(&format!("{PATH}/{second_id}/input_items?limit=2")).ok();
    assert_eq!((&page["first_id"], &page["has_more"]), (&items["last_id"], &json!(true)));
    let after = page["last_id"].as_str().unwrap();
    let rest = server.get(&format!("{PATH}/{second_id}/input_items?limit=2&after={after}")).ok();
    assert_eq!((&rest["data"], &rest["has_more"]), (&json!([items["data"][0]]), &json!(false)));
    // The second response outlives the first.
    assert_eq!(delete(&server, id, &[]).ok(), json!({ "id": id, "object": "response", "deleted": true }));
    assert_eq!(delete(&server, id, &[]).refused(404).1.as_deref(), Some("response_not_found"));
    assert_eq!(server.get(&format!("{PATH}/{id}")).refused(404).1.as_deref(), Some("response_not_found"));
    let refused = server.post(PATH, &body(json!({ "previous_response_id": id })));
    let expected = (Some("previous_response_id".into()), Some("previous_response_not_found".into()));
    assert_eq!(refused.refused(404), expected);
    create(&server, json!({ "previous_response_id": second_id }));
}

#[test]
fn a_streamed_response_is_stored_and_items_can_be_referred_to() {
    let server = Server::start();
    let events = events(&server, json!({ "temperature": 0 }));
    let first = &events.last().unwrap()["response"];
    assert_eq!(&server.get(&format!("{PATH}/{}", first["id"].as_str().unwrap())).ok(), first);
    let message = &first["output"][0];
    let input =
        |item: Value| json!([{ "role": "user", "content": "hello" }, item, { "role": "user", "content": "go on" }]);
    let referred = create(
        &server,
        json!({ "temperature": 0, "input": input(json!({ "type": "item_reference", "id": message["id"] })) }),
    );
    // Output is sent back as it came.
    let repeated = create(&server, json!({ "temperature": 0, "input": input(message.clone()) }));
    assert_eq!(text(&referred), text(&repeated));
    let unknown = json!({ "input": [{ "type": "item_reference", "id": "msg_0" }] });
    let refused = server.post(PATH, &body(unknown));
    assert_eq!(refused.refused(404), (Some("input[0].id".into()), Some("item_not_found".into())));
}

#[test]
fn a_response_that_is_not_to_be_stored_is_not() {
    let server = Server::start();
    let response = create(&server, json!({ "store": false }));
    assert_eq!(response["store"], false);
    server.get(&format!("{PATH}/{}", response["id"].as_str().unwrap())).refused(404);
    assert_eq!(server.metric("pellucid_stored_response_bytes"), 0.0);
    let response = create(&server, json!({}));
    assert!(server.metric("pellucid_stored_response_bytes") > 0.0);
    delete(&server, response["id"].as_str().unwrap(), &[]).ok();
    assert_eq!(server.metric("pellucid_stored_response_bytes"), 0.0);
}

#[test]
fn tenants_see_only_their_own_responses_within_their_limit() {
    let mut a = tenant("a", "key-of-a");
    a.stored_responses = Some(2);
    let mut none = tenant("none", "key-of-none");
    none.stored_responses = Some(0);
    let server = Server::with(Setup { tenants: vec![a, tenant("b", "key-of-b"), none], ..Setup::default() });
    let (key_a, key_b) = ([("Authorization", "Bearer key-of-a")], [("Authorization", "Bearer key-of-b")]);
    let create = |key: &str| server.post_as(key, PATH, &body(json!({}))).ok();
    let get = |response: &Value, headers: &[(&str, &str)], below: &str| {
        server.request("GET", &format!("{PATH}/{}{below}", response["id"].as_str().unwrap()), headers, b"").status
    };
    let (first, other) = (create("key-of-a"), create("key-of-b"));
    for below in ["", "/input_items"] {
        assert_eq!((get(&first, &key_a, below), get(&first, &key_b, below)), (200, 404));
    }
    let id = first["id"].as_str().unwrap();
    delete(&server, id, &key_b).refused(404);
    let continued = body(json!({ "previous_response_id": id }));
    server.post_as("key-of-b", PATH, &continued).refused(404);
    let item = json!([{ "id": first["output"][0]["id"] }, { "role": "user", "content": "a" }]);
    server.post_as("key-of-b", PATH, &body(json!({ "input": item }))).refused(404);
    server.post_as("key-of-a", PATH, &body(json!({ "input": item }))).ok();
    // The least recently used responses make way; another tenant's stay.
    create("key-of-a");
    assert_eq!((get(&first, &key_a, ""), get(&other, &key_b, "")), (404, 200));
    let stateless = server.post_as("key-of-none", PATH, &body(json!({}))).ok();
    assert_eq!(stateless["store"], false);
    let refused = server.post_as("key-of-none", PATH, &body(json!({ "store": true })));
    assert_eq!(refused.refused(400).0.as_deref(), Some("store"));
}

#[test]
fn a_response_that_does_not_fit_is_answered_and_not_stored() {
    let limits = Limits { max_stored_bytes: 16 << 10, ..Limits::default() };
    let server = Server::with(Setup { limits, ..Setup::default() });
    let kept = create(&server, json!({}));
    assert_eq!(kept["store"], true);
    let metadata: Value =
        (0..16).map(|i| (format!("{i}"), json!("é".repeat(512)))).collect::<serde_json::Map<_, _>>().into();
    let large = create(&server, json!({ "metadata": metadata, "input": "hello" }));
    assert_eq!(large["store"], false);
    server.get(&format!("{PATH}/{}", kept["id"].as_str().unwrap())).ok();
}

#[test]
fn a_long_conversation_counts_as_memory_of_the_request() {
    let limits = Limits { max_client_memory: 1 << 20, ..Limits::default() };
    let server = Server::with(Setup { limits, context_len: 16_384, ..Setup::default() });
    let long = create(&server, json!({ "input": "a".repeat(4_000), "max_output_tokens": 1 }));
    assert_eq!(long["store"], true, "{long}");
    server.until("pellucid_client_memory_bytes", 0.0);
    // One message more, but thirty copies of the conversation.
    let reference = json!({ "id": server.get(&format!("{PATH}/{}/input_items", long["id"].as_str().unwrap())).ok()
        ["data"][0]["id"] });
    // The reply that was just read may hold its memory for a moment.
    server.until("pellucid_client_memory_bytes", 0.0);
    let refused = server.post(PATH, &body(json!({ "input": vec![reference; 30], "max_output_tokens": 1 })));
    assert_eq!(refused.refused(413).1.as_deref(), Some("request_too_large"));
    server.until("pellucid_client_memory_bytes", 0.0);
}

#[test]
fn refusals_name_the_field_that_was_sent() {
    let server = Server::start();
    let schema = json!({ "type": "json_schema", "name": "a", "schema": { "type": "no" } });
    for (fields, param) in [
        (json!({ "input": null }), "input"),
        (json!({ "input": [] }), "input"),
        (json!({ "input": 5 }), "input"),
        (json!({ "input": "a ".repeat(400) }), "input"),
        (json!({ "input": [{ "role": "user", "content": [{ "type": "input_image" }] }] }), "input[0].content[0].type"),
        (json!({ "input": [{ "type": "web_search_call", "id": "a" }] }), "input[0].type"),
        (json!({ "input": [{ "type": "reasoning", "content": "a" }] }), "input[0]"),
        (json!({ "max_output_tokens": 0 }), "max_output_tokens"),
        (json!({ "messages": [] }), "messages"),
        (json!({ "temperature": -1 }), "temperature"),
        (json!({ "tools": [{ "type": "web_search" }] }), "tools[0].type"),
        (json!({ "tools": [{ "type": "namespace", "tools": [] }] }), "tools[0].name"),
        (
            json!({ "tools": [{ "type": "namespace", "name": "a", "tools": [{ "type": "custom" }] }] }),
            "tools[0].tools[0].type",
        ),
        (
            json!({ "tools": [{ "type": "namespace", "name": "a", "tools": [{ "type": "function", "name": "+" }] }] }),
            "tools[0].tools[0].name",
        ),
        (json!({ "client_metadata": { "a": 1 } }), "client_metadata.a"),
        (json!({ "client_metadata": "a" }), "client_metadata"),
        (json!({ "tool_choice": { "type": "file_search" } }), "tool_choice.type"),
        (json!({ "text": { "format": { "type": "xml" } } }), "text.format.type"),
        (json!({ "text": { "format": schema } }), "text.format.schema"),
        (json!({ "text": { "verbosity": "loud" } }), "text.verbosity"),
        (json!({ "truncation": "auto" }), "truncation"),
        (json!({ "background": true, "store": false }), "background"),
        (json!({ "background": 1 }), "background"),
        (json!({ "conversation": "conv_1" }), "conversation"),
        (json!({ "prompt": { "id": "a" } }), "prompt"),
        (json!({ "include": ["file_search_call.results"] }), "include[0]"),
        (json!({ "top_logprobs": 3 }), "top_logprobs"),
        (json!({ "top_logprobs": 21, "include": ["message.output_text.logprobs"] }), "top_logprobs"),
        (json!({ "reasoning": { "summary": "detailed" } }), "reasoning.summary"),
        (json!({ "metadata": { "a": 1 } }), "metadata.a"),
        (json!({ "service_tier": "flex" }), "service_tier"),
        (json!({ "stream_options": { "include_usage": true } }), "stream_options.include_usage"),
    ] {
        let shown = fields.to_string();
        assert_eq!(server.post(PATH, &body(fields)).refused(400).0.as_deref(), Some(param), "{shown}");
    }
    let unknown = server.post(PATH, &body(json!({ "model": "other" })));
    assert_eq!(unknown.refused(404).1.as_deref(), Some("model_not_found"));
    let id = create(&server, json!({}))["id"].as_str().unwrap().to_owned();
    for (path, param) in [("?stream=true", "stream"), ("?include[]=a", "include"), ("/input_items?limit=0", "limit")] {
        assert_eq!(server.get(&format!("{PATH}/{id}{path}")).refused(400).0.as_deref(), Some(param));
    }
    let cancel = |id: &str| server.post(&format!("{PATH}/{id}/cancel"), "");
    assert_eq!(cancel(&id).refused(400).1.as_deref(), Some("not_cancellable"));
    cancel("resp_0").refused(404);
    let wrong = server.request("PUT", &format!("{PATH}/{id}"), &[], b"");
    assert_eq!(wrong.refused(405).1.as_deref(), Some("method_not_allowed"));
    assert!(wrong.text().contains("GET and DELETE"), "{}", wrong.text());
}

#[test]
fn a_response_that_fails_ends_with_an_error_and_a_failed_response() {
    let server = Server::start();
    let count = json!({ "model": "tiny", "input": "hello" });
    let count = server.post("/v1/responses/input_tokens", &count.to_string()).ok();
    server.fail_from(count["input_tokens"].as_u64().unwrap() as u32 + 2);
    let events = events(&server, json!({ "max_output_tokens": 20, "ignore_eos": true }));
    let [error, failed] = events.last_chunk().unwrap();
    assert_eq!((&error["type"], &error["code"]), (&json!("error"), &json!("internal_error")));
    let response = &failed["response"];
    assert_eq!((&failed["type"], &response["status"]), (&json!("response.failed"), &json!("failed")));
    assert_eq!((&response["error"]["code"], &response["store"]), (&json!("server_error"), &json!(false)));
    server.get(&format!("{PATH}/{}", response["id"].as_str().unwrap())).refused(404);
}

/// A template that prints calls and results, for a vocabulary with brackets.
const CALLS_TEMPLATE: &str = "{% for m in messages %}[turn]{{ m.role }}: {% if m.content is not none %}{{ m.content }}{% endif %}\
                              {% for call in m.tool_calls or [] %}<call {{ call.id }}>{{ call.function.name }}\
                              {{ call.function.arguments | tojson }}{% endfor %}\
                              {% if m.role == 'tool' %}<{{ m.tool_call_id }}>{% endif %}[end]{% endfor %}\
                              {% if add_generation_prompt %}[turn]{% endif %}";

#[test]
fn calls_and_their_outputs_are_rendered_like_those_of_a_chat() {
    let tiny = TinyModel { has_brackets: true, ..TinyModel::default() };
    let server = Server::with(Setup { template: CALLS_TEMPLATE, tiny, context_len: 1024, ..Setup::default() });
    let call = |id: &str| json!({ "type": "function_call", "call_id": id, "name": "f", "arguments": "{\"a\":1}" });
    let output = |id: &str, output: Value| json!({ "type": "function_call_output", "call_id": id, "output": output });
    let parts = json!([{ "type": "input_text", "text": "b" }, { "type": "input_text", "text": "c" }]);
    let user = json!({ "role": "user", "content": "hi" });
    let text_item = json!({ "role": "assistant", "content": "let me see" });
    let input = json!([
        user,
        text_item,
        call("c1"),
        call("c2"),
        output("c1", json!("a")),
        output("c2", parts),
        call("c3"),
        output("c3", json!("d"))
    ]);
    let chat_call =
        |id: &str| json!({ "id": id, "type": "function", "function": { "name": "f", "arguments": "{\"a\":1}" } });
    let result = |id: &str, content: &str| json!({ "role": "tool", "tool_call_id": id, "content": content });
    let messages = json!([user,
        { "role": "assistant", "content": "let me see", "tool_calls": [chat_call("c1"), chat_call("c2")] },
        result("c1", "a"), result("c2", "b\nc"),
        { "role": "assistant", "tool_calls": [chat_call("c3")] }, result("c3", "d")]);
    let response = create(&server, json!({ "temperature": 0, "input": input }));
    let chat = chat_text(&server, json!({ "temperature": 0, "messages": messages }));
    assert_eq!(text(&response), chat);
    // Errors of the chat name the items.
    for (input, param) in [
        (json!([user, output("c1", json!("a"))]), "input[1].call_id"),
        (
            json!([user, { "type": "function_call", "call_id": "c", "name": "f", "arguments": "[" }]),
            "input[1].arguments",
        ),
    ] {
        let refused = server.post(PATH, &body(json!({ "input": input })));
        assert_eq!(refused.refused(400).0.as_deref(), Some(param), "{}", refused.text());
    }
}

#[test]
fn functions_of_a_namespace_are_called_by_both_names() {
    let tiny = TinyModel { has_brackets: true, ..TinyModel::default() };
    let server = Server::with(Setup { template: CALLS_TEMPLATE, tiny, context_len: 2048, ..Setup::default() });
    let function = |name: &str| {
        let parameters = json!({ "type": "object", "properties": { "n": { "enum": [1, 2] } }, "required": ["n"],
            "additionalProperties": false });
        json!({ "type": "function", "name": name, "parameters": parameters, "strict": false })
    };
    let group = json!({ "type": "namespace", "name": "clock", "description": "Tells the time",
        "tools": [function("now"), function("zone")] });
    let fields = json!({ "tools": [group], "tool_choice": "required", "parallel_tool_calls": false, "seed": 3,
        "max_output_tokens": 200, "client_metadata": { "session": "a" } });
    let response = create(&server, fields.clone());
    let call = &response["output"][0];
    assert_eq!((&call["type"], &call["namespace"]), (&json!("function_call"), &json!("clock")), "{response}");
    assert!(["now", "zone"].contains(&call["name"].as_str().unwrap()), "{call}");
    assert_eq!(response["tools"], json!([group]));
    // The stream announces both names, and a client can send the call back.
    let events = events(&server, fields.clone());
    let added = events.iter().find(|event| event["type"] == "response.output_item.added").unwrap();
    assert_eq!((&added["item"]["namespace"], &added["item"]["name"]), (&call["namespace"], &call["name"]));
    let output = json!({ "type": "function_call_output", "call_id": call["call_id"], "output": "12" });
    let again = json!({ "input": [{ "role": "user", "content": "hello" }, call, output], "tools": [group] });
    create(&server, again);
}
