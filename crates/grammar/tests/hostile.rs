//! Sources that are made to take long, to use much memory or to overflow the stack: each is refused, or compiles and
//! gives masks, within the limits that the compiler counts.

mod common;

use common::{Random, compile, mask, reaches_end, sample};
use pellucid_grammar::{GrammarSource, MAX_SOURCE_BYTES};
use pellucid_sampling::TokenConstraint;
use proptest::prelude::*;
use serde_json::{Value, json};

/// Compiles a source and, if that works, samples a short reply. A matcher may stop with an error, which names a limit.
fn try_out(source: GrammarSource) -> Result<(), String> {
    let grammar = compile(source).map_err(|error| error.to_string())?;
    let mut matcher = grammar.matcher();
    let mut words = common::words();
    let mut random = Random(1);
    for _ in 0..20 {
        if matcher.is_complete() {
            break;
        }
        matcher.mask(&mut words).map_err(|error| error.to_string())?;
        let tokens = common::allowed(&words);
        matcher.accept(tokens[random.below(tokens.len())]).map_err(|error| error.to_string())?;
    }
    Ok(())
}

fn refused(source: GrammarSource) -> String {
    compile(source).expect_err("a refusal").to_string()
}

#[test]
fn schemas_that_refer_to_themselves() {
    let tree = json!({ "type": "object", "properties": { "left": { "$ref": "#" }, "right": { "$ref": "#" } },
        "additionalProperties": false });
    try_out(GrammarSource::JsonSchema(tree)).unwrap();
    for endless in [
        json!({ "$ref": "#" }),
        json!({ "$ref": "#/$defs/a", "$defs": { "a": { "$ref": "#/$defs/b" }, "b": { "$ref": "#/$defs/a" } } }),
        json!({ "allOf": [{ "$ref": "#" }, { "$ref": "#" }] }),
        json!({ "type": "object", "properties": { "a": { "$ref": "#" } }, "required": ["a"] }),
        json!({ "type": "array", "items": { "$ref": "#" }, "minItems": 1 }),
        json!({ "anyOf": [{ "type": "null" }, { "$ref": "#/$defs/a" }], "$defs": { "a": { "type": "array",
            "prefixItems": [{ "$ref": "#/$defs/a" }], "minItems": 1 } } }),
    ] {
        let text = refused(GrammarSource::JsonSchema(endless));
        assert!(text.starts_with("the schema at #"), "{text}");
    }
    let text =
        refused(GrammarSource::Grammar("start: \"a\" | \"(\" start \")\" | loop\nloop: \"[\" loop \"]\"".into()));
    assert!(text.contains("no finite text"), "{text}");
    assert!(refused(GrammarSource::JsonSchema(json!({ "$ref": "#/nowhere" }))).starts_with("the schema at #: "));
}

#[test]
fn chains_of_references_do_not_overflow_the_stack() {
    let mut definitions = serde_json::Map::new();
    for i in 0..5000 {
        let next = json!({ "$ref": format!("#/$defs/d{}", i + 1) });
        definitions.insert(format!("d{i}"), json!({ "allOf": [next, { "minLength": i % 7 }] }));
    }
    definitions.insert("d5000".into(), json!({ "type": "string" }));
    let _ = try_out(GrammarSource::JsonSchema(json!({ "$ref": "#/$defs/d0", "$defs": definitions })));

    let rules: String = (0..12_000).map(|i| format!("r{i}: r{}\n", i + 1)).collect();
    let _ = try_out(GrammarSource::Grammar(format!("start: r0\n{rules}r12000: \"a\"\n")));
    let terminals: String = (0..12_000).map(|i| format!("T{i}: T{}\n", i + 1)).collect();
    let _ = try_out(GrammarSource::Grammar(format!("start: T0\n{terminals}T12000: \"a\"\n")));
    let gbnf: String = (0..12_000).map(|i| format!("r{i} ::= r{}\n", i + 1)).collect();
    let _ = try_out(GrammarSource::Grammar(format!("root ::= r0\n{gbnf}r12000 ::= \"a\"\n")));
}

#[test]
fn enormous_sources_are_refused_or_compile() {
    let values: Vec<String> = (0..20_000).map(|i| format!("v{i:x}")).collect();
    try_out(GrammarSource::JsonSchema(json!({ "enum": values }))).unwrap();
    let texts: Vec<String> = (0..4096).map(|i| format!("choice {i}")).collect();
    try_out(GrammarSource::Choice(texts)).unwrap();
    let properties: serde_json::Map<String, Value> = (0..3000).map(|i| (format!("p{i}"), json!({}))).collect();
    let _ = try_out(GrammarSource::JsonSchema(json!({ "type": "object", "properties": properties })));
    let text = "a".repeat(MAX_SOURCE_BYTES + 1);
    for source in [GrammarSource::Regex(text.clone()), GrammarSource::Choice(vec![text.clone()])] {
        assert!(refused(source).contains("bytes, but at most"));
    }
    assert!(refused(GrammarSource::Choice(vec!["a".into(); 5000])).contains("entries, but at most"));
}

#[test]
fn doubling_is_bounded() {
    let mut definitions = serde_json::Map::new();
    for i in 0..40 {
        let next = json!({ "$ref": format!("#/$defs/d{}", i + 1) });
        definitions.insert(format!("d{i}"), json!({ "anyOf": [{ "items": next.clone() }, next] }));
    }
    definitions.insert("d40".into(), json!({ "type": "string" }));
    let _ = try_out(GrammarSource::JsonSchema(json!({ "$ref": "#/$defs/d0", "$defs": definitions })));
    let rules: String = (0..40).map(|i| format!("T{i}: T{0} T{0}\n", i + 1)).collect();
    let _ = try_out(GrammarSource::Grammar(format!("start: T0\n{rules}T40: \"a\"\n")));
}

#[test]
fn conflicting_bounds_are_refused_with_their_place() {
    for schema in [
        json!({ "properties": { "a": { "type": "string", "minLength": 3, "maxLength": 2 } }, "required": ["a"] }),
        json!({ "type": "object", "properties": { "a": { "type": "integer", "minimum": 3, "maximum": 2 } },
            "required": ["a"] }),
        json!({ "type": "array", "minItems": 3, "maxItems": 2 }),
        json!({ "type": "string", "enum": [1, 2] }),
        json!({ "allOf": [{ "const": 1 }, { "const": 2 }] }),
        json!({ "type": "string", "allOf": [{ "pattern": "^a+$" }, { "pattern": "^b+$" }] }),
        json!({ "type": "array", "items": { "type": "string", "minLength": 4, "pattern": "^.{1,3}$" }, "minItems": 1 }),
        json!({ "type": "object", "properties": { "a": { "type": "integer", "multipleOf": 7, "minimum": 1,
            "maximum": 6 } }, "required": ["a"] }),
        json!({ "type": "object", "required": ["a"], "properties": { "a": false } }),
        json!({ "type": "object", "required": ["a"], "properties": {}, "additionalProperties": false }),
    ] {
        // A value of another type may satisfy a schema that names no type, as the first one does.
        match try_out(GrammarSource::JsonSchema(schema.clone())) {
            Ok(()) => assert!(schema.get("type").is_none(), "{schema}"),
            Err(text) => assert!(text.starts_with("the schema at #"), "{text}"),
        }
    }
}

#[test]
fn pathological_expressions_are_bounded() {
    for text in [
        "(a+)+b",
        "(a|a)*b",
        "(.*a){30}",
        "((((a{1,50}){1,50}){1,50}){1,50}){1,50}",
        "a{1000000000}",
        "(a?){5000}a{5000}",
        "(x+x+)+y",
        "[a-z]*[a-z]*[a-z]*[a-z]*[a-z]*[a-z]*[a-z]*[a-z]*!",
        "(.{1,1000}){1,1000}",
        ".*a.{24}",
    ] {
        let _ = try_out(GrammarSource::Regex(text.into()));
        let _ = try_out(GrammarSource::JsonSchema(json!({ "type": "string", "pattern": text })));
    }
    assert!(refused(GrammarSource::Regex("(".repeat(10_000))).starts_with("the regex: "));
    let _ = try_out(GrammarSource::JsonSchema(json!({ "type": "string", "minLength": 1_000_000 })));
}

#[test]
fn one_source_always_has_the_same_result() {
    let schema = json!({ "type": "object", "properties": { "a": { "type": "string" }, "b": { "enum": [1, "x"] } } });
    let run = || {
        let grammar = compile(GrammarSource::JsonSchema(schema.clone())).unwrap();
        (0..10).map(|seed| sample(&grammar, &mut Random(seed), 60).text).collect::<Vec<_>>()
    };
    assert_eq!(run(), run());
}

/// Schemas of random keywords with random values, right and wrong.
fn any_schema() -> impl Strategy<Value = Value> {
    schema_with_numbers(400)
}

/// Schemas as of [`any_schema`] whose bounds are small, so that replies are short.
fn small_schema() -> impl Strategy<Value = Value> {
    schema_with_numbers(6)
}

fn schema_with_numbers(end: i64) -> impl Strategy<Value = Value> {
    let leaf = prop_oneof![
        any::<bool>().prop_map(Value::from),
        (-5..end).prop_map(Value::from),
        "[a-z()*+?\\[\\]{}|]{0,8}".prop_map(Value::from),
        Just(json!(1e300)),
        Just(Value::Null),
        prop::sample::select(vec!["string", "object", "array", "integer", "number", "date-time", "#", "#/$defs/a"])
            .prop_map(Value::from),
    ];
    let keywords = vec![
        "type",
        "properties",
        "items",
        "anyOf",
        "oneOf",
        "allOf",
        "$ref",
        "$defs",
        "enum",
        "const",
        "required",
        "pattern",
        "format",
        "minLength",
        "maxLength",
        "minItems",
        "maxItems",
        "minimum",
        "maximum",
        "multipleOf",
        "additionalProperties",
        "patternProperties",
        "prefixItems",
        "minProperties",
        "maxProperties",
        "a",
        "exclusiveMinimum",
    ];
    leaf.prop_recursive(4, 32, 4, move |inner| {
        prop_oneof![
            prop::collection::vec(inner.clone(), 0..4).prop_map(Value::Array),
            prop::collection::vec((prop::sample::select(keywords.clone()), inner), 0..4)
                .prop_map(|members| Value::Object(members.into_iter().map(|(k, v)| (k.to_owned(), v)).collect())),
        ]
    })
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 200, failure_persistence: None, ..ProptestConfig::default() })]

    /// No schema panics, hangs or allows a token that the grammar then refuses.
    #[test]
    fn random_schemas_are_refused_or_followed(schema in any_schema()) {
        if let Err(text) = try_out(GrammarSource::JsonSchema(schema)) {
            prop_assert!(!text.contains('\n') && !text.contains("panic"), "{text}");
        }
    }

    /// Every schema that compiles has an end that a reply can reach from anywhere.
    #[test]
    fn random_schemas_end(schema in small_schema(), seed: u64) {
        let Ok(grammar) = compile(GrammarSource::JsonSchema(schema.clone())) else { return Ok(()) };
        let (mut matcher, mut random) = (grammar.matcher(), Random(seed));
        for _ in 0..random.below(30) {
            let tokens = if matcher.is_complete() { Vec::new() } else { mask(&mut *matcher) };
            let Some(&token) = tokens.get(random.below(tokens.len().max(1))) else { break };
            matcher.accept(token).unwrap();
        }
        prop_assert!(reaches_end(&mut *matcher, &mut random, 1500), "{schema}");
    }

    #[test]
    fn random_expressions_are_refused_or_followed(text in "[a-c()*+?\\[\\]{},|^$.\\\\0-9-]{0,24}") {
        let _ = try_out(GrammarSource::Regex(text));
    }

    #[test]
    fn random_grammars_are_refused_or_followed(text in "(start|root|a|A|::=|:|\"x\"|/b/|\\(|\\)|\\||\\*|\\{2,3\\}| |\n){0,30}") {
        let _ = try_out(GrammarSource::Grammar(text));
    }
}
