//! `run` and `explain` with tools from a file.

use pellucid_testing::TinyModel;
use serde_json::json;

use crate::support::Home;
use crate::support::tiny_model::TEMPLATE;

/// A tool as in requests to the server.
fn tool(name: &str, parameters: serde_json::Value) -> serde_json::Value {
    serde_json::json!({ "type": "function", "function": { "name": name, "parameters": parameters } })
}

/// Writes a model with brackets, and a file of tools; returns their paths.
fn model_and_tools(home: &Home, tools: &serde_json::Value) -> (String, String) {
    let (folder, file) = (home.path().join("model"), home.path().join("tools.json"));
    let tiny =
        TinyModel { template: Some(TEMPLATE), context_len: Some(4096), has_brackets: true, ..TinyModel::default() };
    tiny.write(&folder).unwrap();
    std::fs::write(&file, tools.to_string()).unwrap();
    (folder.to_str().unwrap().to_owned(), file.to_str().unwrap().to_owned())
}

#[test]
fn calls_of_tools_are_listed() {
    let home = Home::new();
    let schema = json!({ "type": "object", "properties": { "unit": { "enum": ["kelvin", "celsius"] },
        "days": { "type": "integer", "minimum": 1, "maximum": 9 } }, "required": ["unit", "days"],
        "additionalProperties": false });
    let (model, tools) = model_and_tools(&home, &json!([tool("weather", schema), tool("clock", json!({}))]));
    let base = ["run", "Hello", "--model", &model, "--tools", &tools, "-n", "1500", "--temperature", "1.5"];
    // The random model goes on with the same call; DRY makes it end.
    let run = |more: &[&str]| home.run(&[&base[..], &["--dry-multiplier", "0.8"], more].concat());

    let ran = run(&["--tool-choice", "weather", "--seed", "1"]);
    assert!(ran.stderr.contains("[format of tool calls: generic (its chat template has none)"), "{ran:?}");
    let lines: Vec<&str> = ran.ok().lines().collect();
    assert!(!lines.is_empty() && lines.iter().all(|line| line.starts_with("call: weather(unit=\"")), "{ran:?}");

    let ran = run(&["--tool-choice", "clock", "--seed", "1", "--json"]);
    let reply: serde_json::Value = serde_json::from_str(ran.ok()).unwrap();
    let calls = reply["tool_calls"].as_array().unwrap();
    assert!(!calls.is_empty() && reply["finish_reason"] == "tool_calls" && reply["text"] == "", "{reply}");
    for call in calls {
        assert_eq!((&call["name"], &call["arguments"]), (&json!("clock"), &json!({})), "{reply}");
    }

    // Without a call, the prompt has no tools and the reply is that of a request without them.
    let plain = home.run(&["run", "Hello", "--model", &model, "-n", "40", "--temperature", "1.5", "--seed", "1"]);
    let without = ["--model", &model, "--tools", &tools, "--tool-choice", "none", "-n", "40", "--temperature", "1.5"];
    let without = home.run(&[&["run", "Hello", "--seed", "1"], &without[..]].concat());
    assert_eq!(without.ok(), plain.ok());
    let explained = ["explain", "Hello", "--model", &model, "--tools", &tools, "--tool-choice", "clock", "--json"];
    assert!(home.run(&explained).ok().contains("grammar"));
}

#[test]
fn parts_of_schemas_that_are_not_enforced_are_named() {
    let home = Home::new();
    let unique = json!({ "type": "object", "properties": { "x": { "type": "array", "uniqueItems": true } } });
    let (model, tools) = model_and_tools(&home, &json!([tool("f", unique)]));
    let ran = home.run(&["run", "Hello", "--model", &model, "--tools", &tools, "-n", "4", "--json"]);
    let name = "tools[0].function.parameters.properties.x.uniqueItems";
    let reply: serde_json::Value = serde_json::from_str(ran.ok()).unwrap();
    assert_eq!(reply["not_enforced"], json!([name]));
    assert!(ran.stderr.contains(&format!("note: calls need not satisfy {name}\n")), "{ran:?}");
}

#[test]
fn wrong_tools_are_refused_with_file_and_place() {
    let home = Home::new();
    let (model, file) = model_and_tools(&home, &json!([]));
    let run = |content: &str, more: &[&str]| {
        std::fs::write(&file, content).unwrap();
        let ran = home.run(&[&["run", "Hello", "--model", &model, "--tools", &file], more].concat());
        ran.usage().to_owned()
    };
    let unique = json!({ "type": "object", "properties": { "x": { "type": "array", "uniqueItems": true } } });
    let mut strict = tool("f", unique);
    strict["function"]["strict"] = true.into();
    let good = json!([tool("f", json!({}))]).to_string();
    for (content, more, expected) in [
        ("[\n {]".to_owned(), &[][..], "tools.json, line 2, column 3: this is not JSON: "),
        (json!([]).to_string(), &[], "tools.json: expected at least one tool"),
        (json!([{ "type": "web_search" }]).to_string(), &[], "tools.json: tools[0].type: expected \"function\""),
        (json!([tool("a b", json!({}))]).to_string(), &[], "tools.json: tools[0]: expected a name"),
        (json!([tool("a", json!({})), strict]).to_string(), &[], "tools[1].function.parameters: "),
        (good.clone(), &["--tool-choice", "g"], "--tool-choice: there is no tool \"g\"; the tools are f"),
        (good.clone(), &["--raw"], "--tools cannot be combined with --raw"),
        (good, &["--beams", "2"], "--beams cannot be combined with --tools"),
    ] {
        let error = run(&content, more);
        assert!(error.contains(expected), "{expected:?}: {error}");
    }
    std::fs::remove_file(&file).unwrap();
    let missing = home.run(&["run", "Hello", "--model", &model, "--tools", &file]);
    assert!(missing.usage().contains("there is no file"), "{missing:?}");
    let chat = home.run_with_input(&["run", "--model", &model, "--tool-choice", "auto"], b"Hello");
    assert!(chat.usage().contains("--tools"), "{chat:?}");
}
