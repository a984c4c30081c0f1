//! Calls of tools in every format of the table: replies that are sampled at random from the masks.

mod common;

use std::sync::{Arc, LazyLock};

use common::Random;
use pellucid_checkpoint::HuggingFace;
use pellucid_grammar::{
    CallFormat, CallRules, CallSource, CallTool, Error, FORMATS, GrammarCompiler, GrammarSource, NotEnforced,
    ReplyConstraint, ReplyRules,
};
use pellucid_sampling::{TokenConstraint, TokenMatcher};
use pellucid_tokenizer::Tokenizer;
use serde_json::{Value, json};

/// Tokens that mark structure in some models.
const MARKERS: [&str; 16] = [
    "<tool_call>",
    "</tool_call>",
    "<|channel|>",
    "<|message|>",
    "<|constrain|>",
    "[TOOL_CALLS]",
    "[ARGS]",
    "<｜tool▁calls▁begin｜>",
    "<｜tool▁call▁begin｜>",
    "<｜tool▁sep｜>",
    "<|tool_call>",
    "<tool_call|>",
    "<|\"|>",
    "<|tool_call|>",
    "</arg_value>",
    "<|im_start|>",
];

/// Returns a vocabulary that spells every byte. With `has_markers`, the markers of the formats are control tokens.
fn tokenizer(has_markers: bool) -> Tokenizer {
    let path = concat!(env!("CARGO_MANIFEST_DIR"), "/../tokenizer/fixtures/tokenizers/llama3.json");
    let mut json: Value = serde_json::from_str(&std::fs::read_to_string(path).unwrap()).unwrap();
    let added = json["added_tokens"].as_array_mut().unwrap();
    let markers: &[&str] = if has_markers { &MARKERS } else { &[] };
    for (index, content) in ["<end>", "<|call|>"].iter().chain(markers).enumerate() {
        added.push(json!({ "id": 5000 + index, "content": content, "special": true, "normalized": false,
            "lstrip": false, "rstrip": false, "single_word": false }));
    }
    // Ordinary tokens that end a marker and go on.
    for (index, content) in [">\n", ">\n\n", "><", ">x", "call>{"].iter().enumerate() {
        added.push(json!({ "id": 5500 + index, "content": content, "special": false, "normalized": false,
            "lstrip": false, "rstrip": false, "single_word": false }));
    }
    let folder = HuggingFace {
        config: json!({}),
        generation_config: Some(json!({ "eos_token_id": [5000, 5001] })),
        tokenizer: Some(json.to_string()),
        tokenizer_config: Some(json!({ "eos_token": "<end>" })),
        chat_template: None,
        ..HuggingFace::default()
    };
    Tokenizer::from_hugging_face(&folder).unwrap()
}

/// Returns a vocabulary of single characters.
fn letters(characters: &str, words: &[&str]) -> GrammarCompiler {
    let pieces = characters.chars().map(String::from).chain(words.iter().map(|word| (*word).to_owned()));
    let vocabulary: serde_json::Map<String, Value> =
        pieces.enumerate().map(|(id, piece)| (piece, json!(id + 1))).chain([("<end>".into(), json!(0))]).collect();
    let end = json!({ "id": 0, "content": "<end>", "special": true, "normalized": false, "lstrip": false,
        "rstrip": false, "single_word": false });
    let tokenizer = json!({ "version": "1.0", "added_tokens": [end], "normalizer": null, "pre_tokenizer": null,
        "post_processor": null, "decoder": null, "model": { "type": "BPE", "vocab": vocabulary, "merges": [] } });
    let folder = HuggingFace {
        config: json!({}),
        generation_config: Some(json!({ "eos_token_id": 0 })),
        tokenizer: Some(tokenizer.to_string()),
        tokenizer_config: Some(json!({ "eos_token": "<end>" })),
        chat_template: None,
        ..HuggingFace::default()
    };
    let tokenizer = Arc::new(Tokenizer::from_hugging_face(&folder).unwrap());
    let vocab_size = tokenizer.vocab_size();
    GrammarCompiler::new(tokenizer, vocab_size).unwrap()
}

#[test]
fn grammars_that_the_vocabulary_cannot_spell_to_an_end_are_refused() {
    let compiler = letters("abc\"{}:, 0123", &["de"]);
    let problem = |source| compiler.compile(&source).err().map(|error| error.to_string());
    let regex = |text: &str| problem(GrammarSource::Regex(text.into()));
    for fine in ["[a-c]+", "(ab|xy)c", "a{2,40}", "0*1"] {
        assert_eq!(regex(fine), None, "{fine}");
    }
    for (stuck, missing) in [("abx", "'x'"), ("a(b|cx)", "'x'"), ("x", "spell"), ("(ab|a)f", "'f'")] {
        let text = regex(stuck).unwrap_or_else(|| panic!("{stuck} was accepted"));
        assert!(text.contains(missing) && text.contains("vocabulary can"), "{stuck}: {text}");
    }
    let schema = |name: &str| {
        json!({ "type": "object", "properties": { name: { "type": "boolean" } }, "required": [name],
        "additionalProperties": false })
    };
    let enumeration = json!({ "type": "object", "properties": { "a": { "enum": ["a", "xyz"] } }, "required": ["a"],
        "additionalProperties": false });
    assert_eq!(problem(GrammarSource::JsonSchema(enumeration)), None, "a value that cannot be begun is no dead end");
    let text = problem(GrammarSource::JsonSchema(schema("a"))).unwrap();
    assert!(text.starts_with("the schema at #/properties/a: "), "true and false cannot be spelled: {text}");
    let tools = vec![CallTool { name: "a".into(), parameters: schema("b"), is_strict: false }];
    let source = CallSource { format: format("hermes"), tools, is_parallel: true, is_required: true };
    assert!(problem(GrammarSource::Calls(source)).is_some());
}

struct Model {
    tokenizer: Arc<Tokenizer>,
    compiler: GrammarCompiler,
}

static MODELS: LazyLock<[Model; 2]> = LazyLock::new(|| {
    [true, false].map(|has_markers| {
        let tokenizer = Arc::new(tokenizer(has_markers));
        let compiler = GrammarCompiler::new(tokenizer.clone(), tokenizer.vocab_size()).unwrap();
        Model { tokenizer, compiler }
    })
});

fn format(name: &str) -> &'static CallFormat {
    FORMATS.iter().find(|format| format.name == name).unwrap()
}

fn tools() -> Vec<CallTool> {
    let weather = json!({
        "type": "object",
        "properties": {
            "city": { "type": "string", "maxLength": 12 },
            "days": { "type": "integer", "minimum": 1, "maximum": 9 },
            "unit": { "enum": ["celsius", "kelvin"] },
            "is_exact": { "type": "boolean" }
        },
        "required": ["city", "unit"],
        "additionalProperties": false
    });
    let empty = json!({ "type": "object", "properties": {}, "additionalProperties": false });
    let tool = |name: &str, parameters| CallTool { name: name.into(), parameters, is_strict: true };
    vec![tool("get_weather", weather), tool("get", empty)]
}

impl Model {
    fn constraint(&self, format: &'static CallFormat, is_required: bool, is_parallel: bool) -> ReplyConstraint {
        let source = CallSource { format, tools: tools(), is_parallel, is_required };
        let grammar = self.compiler.compile(&GrammarSource::Calls(source.clone()));
        let grammar = Arc::new(grammar.unwrap_or_else(|error| panic!("{}: {error}", format.name)));
        let calls = CallRules {
            grammar,
            triggers: format.triggers(source.tools.iter().map(|tool| tool.name.as_str())),
            is_at_start: format.is_at_start,
            is_required,
        };
        self.compiler.reply(ReplyRules { calls: Some(calls), ..ReplyRules::default() })
    }

    fn mask(&self, matcher: &mut dyn TokenMatcher) -> Vec<u32> {
        let mut words = vec![0u32; self.tokenizer.vocab_size().div_ceil(32)];
        matcher.mask(&mut words).unwrap();
        let is_set = |id: &u32| words[*id as usize / 32] >> (id % 32) & 1 == 1 && self.tokenizer.token(*id).is_some();
        (0..self.tokenizer.vocab_size() as u32).filter(is_set).collect()
    }

    /// Accepts a text that is spelled with ordinary tokens and markers.
    fn follow(&self, matcher: &mut dyn TokenMatcher, text: &str) {
        for id in self.tokenizer.encode_special(text) {
            let is_allowed = matcher.allows_all() || self.mask(matcher).contains(&id);
            assert!(is_allowed, "{:?} of {text:?}", self.tokenizer.token(id).unwrap().piece);
            matcher.accept(id).unwrap();
        }
    }

    /// Samples a reply, and checks that taking tokens back and accepting them again changes nothing.
    fn sample(&self, matcher: &mut dyn TokenMatcher, random: &mut Random, max_tokens: usize) -> Option<String> {
        let mut ids = Vec::new();
        for _ in 0..max_tokens {
            if matcher.is_complete() {
                break;
            }
            let tokens = self.mask(matcher);
            assert!(!tokens.is_empty(), "a grammar that goes on allows a token");
            let ends: Vec<u32> = tokens.iter().copied().filter(|id| self.tokenizer.end_ids().contains(id)).collect();
            assert!(ends.is_empty() || matcher.may_end());
            let from = if !ends.is_empty() && random.below(2) == 0 { &ends } else { &tokens };
            let token = from[random.below(from.len())];
            matcher.accept(token).unwrap();
            if self.tokenizer.end_ids().contains(&token) {
                break;
            }
            ids.push(token);
            let num_back = random.below(ids.len() + 1).min(4);
            if random.below(8) == 0 {
                matcher.rollback(num_back).unwrap();
                ids[ids.len() - num_back..].iter().for_each(|&id| matcher.accept(id).unwrap());
            }
        }
        let text = String::from_utf8_lossy(&self.tokenizer.decode_bytes(&ids, false)).into_owned();
        matcher.is_complete().then_some(text)
    }
}

/// Every format compiles, with and without tokens for its markers, and its replies end with its own markers.
#[test]
fn every_format_produces_calls() {
    for model in &*MODELS {
        for format in FORMATS {
            for is_parallel in [false, true] {
                let constraint = model.constraint(format, true, is_parallel);
                let mut num_complete = 0;
                for seed in 0..12 {
                    let mut matcher = constraint.matcher();
                    let Some(text) = model.sample(&mut *matcher, &mut Random(seed), 400) else { continue };
                    num_complete += 1;
                    let trigger = &format.triggers(["get"].into_iter())[0];
                    let trigger = if format.is_at_start { &trigger[..1] } else { trigger.as_str() };
                    assert!(text.starts_with(trigger), "{}: {text:?}", format.name);
                    assert!(text.trim_end().ends_with(format.close), "{}: {text:?}", format.name);
                    assert!(text.contains("get"), "{}: {text:?}", format.name);
                    let marker = &format.triggers(["get"].into_iter())[0];
                    if !is_parallel && format.open.is_empty() && !format.is_at_start {
                        assert_eq!(text.matches(marker.as_str()).count(), 1, "{}: {text:?}", format.name);
                    }
                }
                assert!(num_complete >= 2, "{}: {num_complete} of 12 replies ended", format.name);
            }
        }
    }
}

#[test]
fn text_is_free_until_a_trigger() {
    for model in &*MODELS {
        let constraint = model.constraint(format("hermes"), false, true);
        let mut matcher = constraint.matcher();
        for id in model.tokenizer.encode("Let me see: <tool> < then\n") {
            assert!(matcher.allows_all() && matcher.may_end() && !matcher.is_complete());
            matcher.accept(id).unwrap();
        }
        // A control token that is no marker changes nothing.
        if let Some(id) = model.tokenizer.id_of("<|im_start|>") {
            matcher.accept(id).unwrap();
        }
        assert!(matcher.allows_all());
        model.follow(&mut *matcher, "<tool_call>");
        assert!(!matcher.allows_all() && !matcher.may_end());
        model.follow(&mut *matcher, "\n{\"name\": \"get_weather\", \"arguments\": {\"city\": \"Rome\", \"unit\": ");
        let allowed = model.mask(&mut *matcher);
        let pieces: Vec<&str> = allowed.iter().map(|&id| model.tokenizer.token(id).unwrap().piece).collect();
        assert!(pieces.iter().all(|piece| piece.starts_with('"') || piece.starts_with(['Ġ', 'Ċ'])), "{pieces:?}");
        model.follow(&mut *matcher, "\"kelvin\"}}\n</tool_call>");
        assert!(matcher.may_end());
        model.follow(&mut *matcher, "\n<tool_call>");
        assert!(!matcher.may_end());
    }
}

/// A token that completes a trigger may go on only as the grammar of calls does.
#[test]
fn tokens_beyond_a_trigger_are_checked() {
    let model = &MODELS[1];
    let constraint = model.constraint(format("hermes"), false, true);
    let mut matcher = constraint.matcher();
    let partial = model.tokenizer.encode("<tool_call");
    partial.iter().for_each(|&id| matcher.accept(id).unwrap());
    assert!(!matcher.allows_all());
    let allowed = model.mask(&mut *matcher);
    let mut num_longer = [0, 0];
    for id in 0..model.tokenizer.vocab_size() as u32 {
        let Some(token) = model.tokenizer.token(id) else { continue };
        let Some(rest) = token.bytes.strip_prefix(b">").filter(|rest| !rest.is_empty()) else {
            assert!(allowed.contains(&id));
            continue;
        };
        let is_fine = rest.iter().all(|byte| b" \t\n".contains(byte));
        assert_eq!(allowed.contains(&id), is_fine, "{:?}", token.piece);
        num_longer[usize::from(is_fine)] += 1;
        if is_fine {
            let mut copy = constraint.matcher();
            partial.iter().for_each(|&id| copy.accept(id).unwrap());
            copy.accept(id).unwrap();
            model.follow(&mut *copy, "{\"name\": \"get\"");
            copy.rollback(1).unwrap();
        }
    }
    assert!(num_longer[0] > 0, "{num_longer:?}");
}

/// An answer that is JSON or a list stays free, unless it names a tool.
#[test]
fn calls_without_markers_are_recognized_at_the_start_by_name() {
    for model in &*MODELS {
        for (name, call, other) in [
            ("llama-3-json", "{\"name\": \"get\", ", "{\"name\": \"Ada\", \"x\": {\"name\": \"get\", "),
            ("python", "[get(", "[1, get(2)] or [get("),
        ] {
            let constraint = model.constraint(format(name), false, true);
            let mut matcher = constraint.matcher();
            model.follow(&mut *matcher, call);
            assert!(!matcher.allows_all() && !matcher.may_end(), "{name}");
            let mut matcher = constraint.matcher();
            model.follow(&mut *matcher, other);
            assert!(matcher.allows_all() && matcher.may_end(), "{name}");
        }
    }
}

#[test]
fn an_answer_of_a_grammar_or_a_call() {
    for model in &*MODELS {
        let schema = json!({ "type": "object", "properties": { "n": { "type": "integer" } }, "required": ["n"] });
        let answer = Arc::new(model.compiler.compile(&GrammarSource::JsonSchema(schema)).unwrap());
        for name in ["hermes", "harmony"] {
            let format = format(name);
            let source = CallSource { format, tools: tools(), is_parallel: true, is_required: false };
            let calls = CallRules {
                grammar: Arc::new(model.compiler.compile(&GrammarSource::Calls(source)).unwrap()),
                triggers: format.triggers(["get"].into_iter()),
                is_at_start: false,
                is_required: false,
            };
            let heading = "<|channel|>final<|message|>";
            let answer_open = (name == "harmony").then(|| heading.to_owned());
            let prefix = answer_open.clone().unwrap_or_default();
            let call = match name {
                "harmony" => "<|channel|>commentary to=functions.get <|constrain|>json<|message|>{}",
                _ => "<tool_call>{\"name\": \"get\", \"arguments\": {}}</tool_call>",
            };
            let rules = ReplyRules { answer_open, answer: Some(answer.clone()), calls: Some(calls) };
            let constraint = model.compiler.reply(rules);
            let mut matcher = constraint.matcher();
            assert!(!matcher.allows_all() && !matcher.may_end());
            model.follow(&mut *matcher, &format!("{prefix}{{\"n\": 5}}"));
            assert!(matcher.may_end(), "{name}");
            matcher.rollback(2).unwrap();
            assert!(!matcher.may_end());
            let mut matcher = constraint.matcher();
            model.follow(&mut *matcher, call);
            assert!(matcher.may_end(), "{name}");
            let num_tokens = model.tokenizer.encode_special(call).len();
            matcher.rollback(num_tokens).unwrap();
            model.follow(&mut *matcher, &format!("{prefix}{{\"n\": "));
        }
    }
}

#[test]
fn a_schema_that_is_not_enforced_is_refused_with_the_name_of_the_tool() {
    let refuse = |name: &str, parameters: Value| {
        let tools = vec![CallTool { name: "f".into(), parameters, is_strict: true }];
        let source = CallSource { format: format(name), tools, is_parallel: true, is_required: true };
        let error = MODELS[0].compiler.compile(&GrammarSource::Calls(source)).unwrap_err();
        assert!(matches!(error, Error::Tool { .. }), "{error}");
        error.to_string()
    };
    let unique = json!({ "properties": { "a": { "uniqueItems": true } } });
    for format in ["hermes", "qwen3-coder", "lfm2", "gemma4"] {
        let text = refuse(format, unique.clone());
        assert!(text.starts_with("the tool \"f\": the schema at #/properties/a/uniqueItems: "), "{text}");
    }
    let text = refuse("qwen3-coder", json!({ "properties": { "a": {} }, "minProperties": 1 }));
    assert!(text.starts_with("the tool \"f\": the schema at #/minProperties: "), "{text}");
    let nested = json!({ "properties": { "a": { "type": "object", "properties": { "b": { "pattern": "x", "type": "string" } } } } });
    let text = refuse("gemma4", nested);
    assert!(text.starts_with("the tool \"f\": the schema at #/properties/a/properties/b: "), "{text}");
    let text = refuse("hermes", json!({ "properties": { "a": { "pattern": "(" } } }));
    assert!(text.starts_with("the tool \"f\": the schema at #/properties/a"), "{text}");
}

/// Tools as servers of the Model Context Protocol publish them (file system, GitHub, Playwright, Memory), and others
/// with keywords that are not enforced.
fn published_tools(is_strict: bool) -> Vec<CallTool> {
    let list: Value = serde_json::from_str(include_str!("../fixtures/mcp_tools.json")).unwrap();
    let tool = |tool: &Value| {
        let function = &tool["function"];
        let name = function["name"].as_str().unwrap().to_owned();
        CallTool { name, parameters: function["parameters"].clone(), is_strict }
    };
    list.as_array().unwrap().iter().map(tool).collect()
}

#[test]
fn keywords_that_are_not_enforced_are_left_out_and_named_unless_a_tool_is_strict() {
    let compile = |format, tools| {
        MODELS[0].compiler.compile(&GrammarSource::Calls(CallSource {
            format,
            tools,
            is_parallel: true,
            is_required: true,
        }))
    };
    let grammar = compile(format("hermes"), published_tools(false)).unwrap();
    let named = |part: &NotEnforced| format!("{} {}", part.tool, part.place);
    let mut found: Vec<String> = grammar.not_enforced().iter().map(named).collect();
    found.sort();
    assert_eq!(
        found,
        [
            "calendar_create_event #/dependentRequired",
            "calendar_create_event #/if",
            "calendar_create_event #/properties/attendees/contains",
            "calendar_create_event #/properties/color/not",
            "calendar_create_event #/properties/reminders/propertyNames",
            "calendar_create_event #/properties/rrule/pattern",
            "calendar_create_event #/then",
            "notion_search #/properties/body/format",
            "notion_search #/properties/parent/oneOf",
            "openapi_update_order #/properties/note/nullable",
            "openapi_update_order #/properties/price/exclusiveMinimum",
            "settings_patch #/properties/extra/$ref",
            "settings_patch #/properties/values/additionalProperties",
            "settings_patch #/properties/values/patternProperties",
            "settings_patch #/unevaluatedProperties",
            "youtube_channels_batch #/properties/ids/uniqueItems",
        ]
    );
    let strict = |tool: &CallTool| CallTool { is_strict: true, ..tool.clone() };
    for tool in published_tools(false) {
        let error = compile(format("hermes"), vec![strict(&tool)]).err().map(|error| error.to_string());
        let is_named = grammar.not_enforced().iter().any(|part| part.tool == tool.name);
        assert_eq!(error.is_some(), is_named, "{}: {error:?}", tool.name);
        assert!(error.is_none_or(|text| text.starts_with(&format!("the tool {:?}: the schema at #/", tool.name))));
    }
    // The rest of each schema is enforced: without its left-out parts it is a schema that a strict tool may have.
    assert!(grammar.tools().iter().all(|tool| compile(format("hermes"), vec![strict(tool)]).is_ok()));
    assert_eq!(grammar.tools()[0], published_tools(false)[0], "a schema that is enforced stays as it is");
    // A mistake in a schema is refused in any case.
    for wrong in [
        json!({ "properties": { "a": { "type": "text" } } }),
        json!({ "properties": { "a": { "minimum": 3, "maximum": 1, "type": "integer" } }, "required": ["a"] }),
    ] {
        let tool = CallTool { name: "f".into(), parameters: wrong, is_strict: false };
        assert!(matches!(compile(format("hermes"), vec![tool]), Err(Error::Tool { .. })));
    }
}

/// Every syntax of arguments can write calls of published tools. Those that write arguments one by one enforce less.
#[test]
fn published_tools_can_be_called_in_every_syntax() {
    let model = &MODELS[0];
    let tools = published_tools(false);
    for format in ["qwen3-coder", "lfm2", "gemma4"].map(format) {
        let source = CallSource { format, tools: tools.clone(), is_parallel: false, is_required: true };
        let grammar = Arc::new(model.compiler.compile(&GrammarSource::Calls(source)).unwrap());
        assert!(grammar.not_enforced().len() >= 15, "{}: {:?}", format.name, grammar.not_enforced());
        let triggers = format.triggers(tools.iter().map(|tool| tool.name.as_str()));
        let calls = CallRules { grammar, triggers, is_at_start: format.is_at_start, is_required: true };
        let constraint = model.compiler.reply(ReplyRules { calls: Some(calls), ..ReplyRules::default() });
        for seed in 0..3 {
            let mut matcher = constraint.matcher();
            model.sample(&mut *matcher, &mut Random(seed), 60);
        }
    }
}
