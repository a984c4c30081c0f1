//! Calls of tools in every format: replies of a model without weights, sampled at temperature 1.5, always split into
//! calls whose arguments satisfy their schema, however the text is cut.

use std::sync::Arc;

use pellucid_checkpoint::HuggingFace;
use pellucid_engine::{EngineHandle, Request, TenantId};
use pellucid_generate::{
    CallDelta, CallFormat, Delta, Finish, Generation, GenerationRequest, GrammarSource, LoadedModel, PromptRequest,
    ReplyPart, ReplySplitter, TOOL_FORMATS, Tool, ToolChoice, ToolRules,
};
use pellucid_sampling::SamplingParams;
use pellucid_tokenizer::{ChatTemplate, Tokenizer};
use serde_json::{Value, json};

use crate::support;

const TENANT: TenantId = TenantId(0);
const END: u32 = 5000;

/// Markers of the formats, which are control tokens in one of the two models.
const MARKERS: [&str; 21] = [
    // Harmony is known by this token and `<|call|>`: `<|end|>` then ends no reply.
    "<|return|>",
    "<tool_call>",
    "</tool_call>",
    "<|channel|>",
    "<|message|>",
    "<|constrain|>",
    "[TOOL_CALLS]",
    "[ARGS]",
    "[CALL_ID]",
    "<｜tool▁calls▁begin｜>",
    "<｜tool▁call▁begin｜>",
    "<｜tool▁sep｜>",
    "<｜tool▁call▁end｜>",
    "<｜tool▁calls▁end｜>",
    "<|tool_call>",
    "<tool_call|>",
    "<|\"|>",
    "<|tool_call|>",
    "</arg_value>",
    "<|tool_call_start|>",
    "<|tool_calls_section_begin|>",
];

fn tokenizer(has_markers: bool) -> Arc<Tokenizer> {
    let path = concat!(env!("CARGO_MANIFEST_DIR"), "/../tokenizer/fixtures/tokenizers/llama3.json");
    let mut json: Value = serde_json::from_str(&std::fs::read_to_string(path).unwrap()).unwrap();
    let added = json["added_tokens"].as_array_mut().unwrap();
    let markers: &[&str] = if has_markers { &MARKERS } else { &[] };
    for (index, content) in ["<end>", "<|call|>"].iter().chain(markers).enumerate() {
        added.push(json!({ "id": END as usize + index, "content": content, "special": true, "normalized": false,
            "lstrip": false, "rstrip": false, "single_word": false }));
    }
    let folder = HuggingFace {
        config: json!({}),
        generation_config: Some(json!({ "eos_token_id": [END, END + 1] })),
        tokenizer: Some(json.to_string()),
        tokenizer_config: Some(json!({ "eos_token": "<end>" })),
        ..HuggingFace::default()
    };
    Arc::new(Tokenizer::from_hugging_face(&folder).unwrap())
}

/// Returns a model whose template has the marks of a format.
fn model(format: &CallFormat, has_markers: bool) -> LoadedModel {
    let tokenizer = tokenizer(has_markers);
    let vocab_size = tokenizer.vocab_size();
    let tools = if format.is_generic() { "" } else { "{% if tools %}{{ tools | tojson }}{% endif %}" };
    let messages = "{% for m in messages %}{{ m.content }}{% endfor %}";
    let source = format!("{{# {} #}}{tools}{messages}", format.template.join(" "));
    LoadedModel {
        template: Some(ChatTemplate::compile(&source, &tokenizer).unwrap()),
        vocab_size,
        engine: EngineHandle::start(support::engine(vocab_size)),
        tokenizer,
        ..support::model()
    }
}

fn tool(name: &str, parameters: Value) -> Tool {
    Tool { name: name.into(), description: None, parameters: Some(parameters), is_strict: true, definition: None }
}

fn tools() -> Vec<Tool> {
    let weather = json!({
        "type": "object",
        "properties": {
            "city": { "type": "string", "maxLength": 9 },
            "days": { "type": "integer", "minimum": 1, "maximum": 9 },
            "unit": { "enum": ["celsius", "kel\"vin"] },
            "is_exact": { "type": "boolean" },
            "near": { "type": "array", "items": { "type": "number", "minimum": 0, "maximum": 5 } },
            "note": { "anyOf": [{ "type": "string", "maxLength": 5 }, { "type": "null" }] },
            "at": { "type": "object", "properties": { "on": { "type": "boolean" } }, "required": ["on"],
                "additionalProperties": false }
        },
        "required": ["city", "unit", "at"],
        "additionalProperties": false
    });
    vec![tool("get_weather", weather), tool("get", json!({}))]
}

/// Checks the arguments of a call against the schemas above, without the grammar.
fn check(call: &CallDelta, context: &str) {
    let arguments: Value =
        serde_json::from_str(&call.arguments).unwrap_or_else(|error| panic!("{context}: {error}: {call:?}"));
    let members = arguments.as_object().unwrap();
    if call.name.as_deref() == Some("get") {
        assert!(members.is_empty(), "{context}: {call:?}");
        return;
    }
    assert_eq!(call.name.as_deref(), Some("get_weather"), "{context}");
    for name in ["city", "unit", "at"] {
        assert!(members.contains_key(name), "{context}: {arguments}");
    }
    for (name, value) in members {
        let is_valid = match name.as_str() {
            "city" => value.as_str().is_some_and(|text| text.chars().count() <= 9),
            "days" => value.as_u64().is_some_and(|days| (1..=9).contains(&days)),
            "unit" => *value == "celsius" || *value == "kel\"vin",
            "is_exact" => value.is_boolean(),
            "near" => value.as_array().unwrap().iter().all(|item| (0.0..=5.0).contains(&item.as_f64().unwrap())),
            "note" => value.is_null() || value.as_str().is_some_and(|text| text.chars().count() <= 5),
            "at" => value["on"].is_boolean() && value.as_object().unwrap().len() == 1,
            _ => false,
        };
        assert!(is_valid, "{context}: {name}: {value}");
    }
}

/// Numbers from a seed (SplitMix64).
struct Random(u64);

impl Random {
    fn below(&mut self, limit: usize) -> usize {
        self.0 = self.0.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        ((z ^ (z >> 31)) % limit as u64) as usize
    }
}

/// Splits a text that is cut at random into answer and calls. Every piece of arguments keeps a beginning of JSON.
fn split(splitter: &ReplySplitter, text: &str, random: &mut Random) -> (String, Vec<CallDelta>) {
    let mut splitter = splitter.clone();
    let mut whole = Delta::new(0);
    let mut rest = text;
    let add = |parts: Vec<ReplyPart>, whole: &mut Delta| {
        for part in parts {
            let mut delta = Delta::new(0);
            match part {
                ReplyPart::Answer(text) => {
                    assert!(whole.calls.is_empty(), "no text follows a call: {text:?}");
                    delta.text = text;
                }
                ReplyPart::Call(call) => {
                    // The name comes first and once.
                    let is_new = call.index == whole.calls.len();
                    assert_eq!((call.name.is_some(), call.id.is_some()), (is_new, is_new), "{call:?}");
                    delta.calls.push(call);
                }
                ReplyPart::Thought(text) => panic!("{text:?}"),
            }
            whole.append(delta).unwrap();
        }
    };
    while !rest.is_empty() {
        let max = 1 + random.below(7);
        let end = rest.char_indices().map(|(at, c)| at + c.len_utf8()).take(max).last().unwrap();
        add(splitter.push(&rest[..end], false), &mut whole);
        rest = &rest[end..];
    }
    add(splitter.finish(), &mut whole);
    (whole.text, whole.calls)
}

struct Reply {
    delta: Delta,
    /// The text of all tokens.
    text: String,
    splitter: ReplySplitter,
}

fn generate(model: &LoadedModel, rules: &ToolRules, answer: Option<GrammarSource>, seed: u64) -> Reply {
    let plan = model.plan_reply(TENANT, rules, answer).unwrap();
    let sampling =
        SamplingParams { seed, temperature: 1.5, end_ids: model.tokenizer.end_ids().to_vec(), ..Default::default() };
    let request = Request { max_tokens: Some(700), trace: true, ..Request::new(vec![1, 2, 3], sampling) };
    let mut prompt = PromptRequest::chat(request);
    plan.apply(&mut prompt);
    let splitter = prompt.splitter.clone().unwrap_or_default();
    let generation = Generation::submit(model, GenerationRequest::new(prompt)).unwrap();
    let (mut replies, _) = generation.into_replies().unwrap();
    let delta = replies.remove(0);
    let ids: Vec<u32> = delta.traces.iter().map(|trace| trace.token.draw.winner.id).collect();
    let ids: Vec<u32> = ids.into_iter().filter(|id| !model.tokenizer.end_ids().contains(id)).collect();
    Reply { text: model.tokenizer.decode(&ids, false), delta, splitter }
}

#[test]
fn required_calls_of_every_format_validate_however_they_are_cut() {
    for format in TOOL_FORMATS {
        let mut num_complete = 0;
        for has_markers in [true, false] {
            let model = model(format, has_markers);
            assert_eq!(model.calling().format().name, format.name);
            let is_parallel = has_markers;
            {
                let rules = ToolRules::new(tools(), ToolChoice::Required, is_parallel).unwrap();
                for seed in 0..3 {
                    let Reply { delta, text, splitter } = generate(&model, &rules, None, seed);
                    let context = format!("{} {has_markers} {is_parallel} {seed}: {text:?}", format.name);
                    assert_eq!(delta.text, "", "{context}");
                    assert!(!delta.calls.is_empty() || delta.finish == Some(Finish::MaxTokens), "{context}");
                    if delta.finish == Some(Finish::MaxTokens) {
                        continue;
                    }
                    num_complete += 1;
                    assert!(matches!(delta.finish, Some(Finish::ToolCalls(_))), "{context}: {:?}", delta.finish);
                    assert!(is_parallel || delta.calls.len() == 1, "{context}");
                    delta.calls.iter().for_each(|call| check(call, &context));
                    for cut in 0..4 {
                        let (answer, calls) = split(&splitter, &text, &mut Random(cut));
                        assert_eq!((answer.as_str(), &calls), ("", &delta.calls), "{context}");
                    }
                }
            }
        }
        assert!(num_complete >= 2, "{}: {num_complete} of 6 replies ended", format.name);
    }
}

#[test]
fn a_named_tool_is_the_only_one() {
    let model = model(CallFormat::generic(), true);
    let rules = ToolRules::new(tools(), ToolChoice::Named("get".into()), true).unwrap();
    for seed in 0..5 {
        let reply = generate(&model, &rules, None, seed);
        assert!(reply.delta.calls.iter().all(|call| call.name.as_deref() == Some("get")), "{}", reply.text);
        assert!(!reply.delta.calls.is_empty(), "{}", reply.text);
    }
    // Without calls, the reply is text.
    let none = ToolRules::new(tools(), ToolChoice::None, true).unwrap();
    let plan = model.plan_reply(TENANT, &none, None).unwrap();
    let mut prompt = PromptRequest::chat(Request::new(vec![1], SamplingParams::default()));
    plan.apply(&mut prompt);
    assert!(plan.tools().is_none() && prompt.splitter.is_none() && prompt.request.constraint.is_none());
}

#[test]
fn an_answer_follows_its_grammar_where_a_call_is_possible() {
    for name in ["hermes", "llama-3-json", "harmony", "mistral"] {
        let format = TOOL_FORMATS.iter().find(|format| format.name == name).unwrap();
        let model = model(format, true);
        let rules = ToolRules::new(tools(), ToolChoice::Auto, true).unwrap();
        let choices = GrammarSource::Choice(vec!["yes".into(), "no".into()]);
        let (mut num_answers, mut num_calls) = (0, 0);
        // The model chooses at random between an answer and a call.
        for seed in 0..100 {
            if num_answers > 0 && num_calls > 0 {
                break;
            }
            let reply = generate(&model, &rules, Some(choices.clone()), seed);
            if reply.delta.finish == Some(Finish::MaxTokens) {
                continue;
            }
            if reply.delta.calls.is_empty() {
                assert!(["yes", "no"].contains(&reply.delta.text.as_str()), "{name}: {}", reply.text);
                num_answers += 1;
            } else {
                reply.delta.calls.iter().for_each(|call| check(call, &reply.text));
                assert_eq!(reply.delta.text, "", "{name}");
                num_calls += 1;
            }
        }
        assert!(num_answers > 0 && num_calls > 0, "{name}: {num_answers} answers, {num_calls} calls");
    }
}

/// Text before a call is answer, and markers never reach it.
#[test]
fn text_before_calls_is_answer() {
    for (name, reply, answer, calls) in [
        (
            "hermes",
            "Let me see. < <tool\n\n<tool_call>\n{\"name\": \"get\", \"arguments\": {}}\n</tool_call>\n<tool_call>{\"name\":\"get\",\"arguments\":{}}</tool_call>",
            "Let me see. < <tool",
            vec![("get", json!({})), ("get", json!({}))],
        ),
        (
            "qwen3-coder",
            "Yes.\n<tool_call>\n<function=get_weather>\n<parameter=city>\na\n<b> \"é\"\n</parameter>\n<parameter=unit>\nkel\"vin\n</parameter>\n<parameter=note>\nnull\n</parameter>\n<parameter=at>\n{\"on\": true}\n</parameter>\n</function>\n</tool_call>",
            "Yes.",
            vec![(
                "get_weather",
                json!({ "city": "a\n<b> \"é\"", "unit": "kel\"vin", "note": null, "at": { "on": true } }),
            )],
        ),
        (
            "lfm2",
            "<|tool_call_start|>[get_weather(city=\"a, (b)=\\\"\", unit=\"celsius\", is_exact=True, note=None, near=[1, 2.5], at={\"on\": false}), get()]<|tool_call_end|>",
            "",
            vec![
                (
                    "get_weather",
                    json!({ "city": "a, (b)=\"", "unit": "celsius", "is_exact": true, "note": null, "near": [1, 2.5], "at": { "on": false } }),
                ),
                ("get", json!({})),
            ],
        ),
        (
            "gemma4",
            "Hm.<|tool_call>call:get_weather{city:<|\"|>a{b},\"c\"<|\"|>,near:[],unit:<|\"|>celsius<|\"|>,at:{on:true}}<tool_call|><|tool_call>call:get{}<tool_call|>",
            "Hm.",
            vec![
                ("get_weather", json!({ "city": "a{b},\"c\"", "near": [], "unit": "celsius", "at": { "on": true } })),
                ("get", json!({})),
            ],
        ),
        ("llama-3-json", " {\"name\": \"get\", \"parameters\": {}}", "", vec![("get", json!({}))]),
        (
            "llama-3-json",
            "{\"name\": \"other\", \"parameters\": {}} ",
            "{\"name\": \"other\", \"parameters\": {}} ",
            vec![],
        ),
        (
            "mistral-list",
            "[TOOL_CALLS][{\"name\": \"get\", \"arguments\": {}}, {\"name\": \"get\", \"arguments\": {}}]",
            "",
            vec![("get", json!({})), ("get", json!({}))],
        ),
        ("harmony", "<|channel|>final<|message|>Hello <|channel|>", "Hello <|channel|>", vec![]),
    ] {
        let format = TOOL_FORMATS.iter().find(|format| format.name == name).unwrap();
        let model = model(format, true);
        let rules = ToolRules::new(tools(), ToolChoice::Auto, true).unwrap();
        let mut prompt = PromptRequest::chat(Request::new(vec![1], SamplingParams::default()));
        model.plan_reply(TENANT, &rules, None).unwrap().apply(&mut prompt);
        let splitter = prompt.splitter.unwrap();
        for seed in 0..50 {
            let (text, found) = split(&splitter, reply, &mut Random(seed));
            assert_eq!(text, answer, "{name}");
            let found: Vec<(&str, Value)> = found
                .iter()
                .map(|call| (call.name.as_deref().unwrap(), serde_json::from_str(&call.arguments).unwrap()))
                .collect();
            assert_eq!(found, calls, "{name}");
        }
        // A reply that is cut off never shows a marker, and its arguments are a beginning of JSON.
        for end in (0..reply.len()).filter(|end| reply.is_char_boundary(*end)) {
            let (text, found) = split(&splitter, &reply[..end], &mut Random(end as u64));
            assert!(answer.starts_with(text.trim_end()) || reply[..end].ends_with(&text), "{name}: {text:?}");
            assert!(found.len() <= calls.len(), "{name}");
        }
    }
}

/// Thoughts precede the answer or the calls, also where each part has a heading.
#[test]
fn thoughts_precede_calls() {
    let harmony = "{# <|channel|>analysis<|message|> <|call|> <|end|> #}{% if tools %}{{ tools }}{% endif %}x";
    let tags = "{# <tool_call> <think> </think> #}{% if tools %}{{ tools }}{% endif %}x";
    let call = "<tool_call>{\"name\": \"get\", \"arguments\": {}}</tool_call>";
    for (source, reply, thoughts, answer, num_calls) in [
        (
            harmony,
            "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>commentary to=functions.get <|constrain|>json<|message|>{}",
            "Hm.",
            "",
            1,
        ),
        (
            harmony,
            "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>final<|message|>Yes.",
            "Hm.",
            "Yes.",
            0,
        ),
        (tags, &format!("<think>\nHm {call}\n</think>\n\nYes.\n\n{call}"), &format!("Hm {call}"), "Yes.", 1),
    ] {
        let mut model = model(CallFormat::generic(), true);
        model.template = Some(ChatTemplate::compile(source, &model.tokenizer).unwrap());
        let rules = ToolRules::new(vec![tool("get", json!({}))], ToolChoice::Auto, true).unwrap();
        let mut prompt = PromptRequest::chat(Request::new(vec![1], SamplingParams::default()));
        model.plan_reply(TENANT, &rules, None).unwrap().apply(&mut prompt);
        model.separate_thoughts(&mut prompt, "", None);
        // The constraint allows the reply, whose parts the splitter separates.
        let constraint = prompt.request.constraint.unwrap();
        let mut matcher = constraint.matcher();
        let (mut splitter, mut whole) = (prompt.splitter.unwrap(), Delta::new(0));
        let mut add = |parts: Vec<ReplyPart>| {
            for part in parts {
                match part {
                    ReplyPart::Answer(text) => whole.text += &text,
                    ReplyPart::Thought(text) => whole.thoughts += &text,
                    ReplyPart::Call(call) => whole.append(Delta { calls: vec![call], ..Delta::new(0) }).unwrap(),
                }
            }
        };
        for id in model.tokenizer.encode_special(reply) {
            let mut words = vec![0u32; model.vocab_size.div_ceil(32)];
            matcher.mask(&mut words).unwrap();
            let piece = model.tokenizer.decode(&[id], false);
            let is_allowed = matcher.allows_all() || words[id as usize / 32] >> (id % 32) & 1 == 1;
            assert!(is_allowed, "{piece:?} of {reply:?}: {}", matcher.expected());
            matcher.accept(id).unwrap();
            add(splitter.push(&piece, false));
        }
        assert!(matcher.may_end(), "{reply:?}");
        add(splitter.finish());
        assert_eq!((whole.thoughts.as_str(), whole.text.as_str()), (thoughts, answer));
        assert_eq!(whole.calls.len(), num_calls, "{reply:?}");
    }
}

#[test]
fn ids_differ_between_calls_choices_and_prompts() {
    for (name, len, prefix) in [("hermes", 29, "call_"), ("mistral", 9, "")] {
        let format = TOOL_FORMATS.iter().find(|format| format.name == name).unwrap();
        let model = model(format, true);
        let rules = ToolRules::new(vec![tool("get", json!({}))], ToolChoice::Required, true).unwrap();
        let plan = model.plan_reply(TENANT, &rules, None).unwrap();
        let mut ids = Vec::new();
        for first in [1, 2] {
            let sampling = SamplingParams { end_ids: vec![END, END + 1], ..SamplingParams::default() };
            let request = Request { num_choices: 2, best_of: 2, ..Request::new(vec![first], sampling) };
            let mut prompt = PromptRequest::chat(Request { max_tokens: Some(300), ..request });
            plan.apply(&mut prompt);
            let generation = Generation::submit(&model, GenerationRequest::new(prompt)).unwrap();
            for reply in generation.into_replies().unwrap().0 {
                ids.extend(reply.calls.into_iter().filter_map(|call| call.id));
            }
        }
        assert!(ids.len() >= 4, "{name}: {ids:?}");
        assert!(ids.iter().all(|id| id.len() == len && id.starts_with(prefix)), "{ids:?}");
        let mut unique = ids.clone();
        unique.sort_unstable();
        unique.dedup();
        assert_eq!(unique.len(), ids.len(), "{name}");
    }
}
