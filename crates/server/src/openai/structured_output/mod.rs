//! Structured output in requests: OpenAI's `response_format` and vLLM's `structured_outputs` become the source of a
//! grammar, which the model's compiler turns into a constraint.

mod schemas;

use std::sync::Arc;

use pellucid_generate::{GrammarError, GrammarSource, LoadedModel, MAX_GRAMMAR_CHOICES, MAX_SOURCE_BYTES};
use pellucid_sampling::TokenConstraint;

use crate::http::error::{ApiError, RETRY_SOON_S};
use crate::http::fields::{self, Fields, shown};
use crate::http::json::Json;
use crate::limits::tenants::Tenant;

pub(crate) use schemas::{response_format, structured_outputs};

/// Memory that is charged for the parser of one reply while it is generated; most need less.
pub(crate) const BYTES_PER_REPLY: usize = 1 << 20;
const MAX_WORD_LEN: usize = 64;
const MAX_DESCRIPTION_LEN: usize = 4096;

/// The constraint that a client asks for, and the field that it comes from.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct StructuredOutput {
    pub(crate) source: GrammarSource,
    pub(crate) param: String,
}

/// Fields of vLLM's older versions, and what replaces them.
const RENAMED: [(&str, &str); 8] = [
    ("guided_json", "use structured_outputs.json"),
    ("guided_regex", "use structured_outputs.regex"),
    ("guided_choice", "use structured_outputs.choice"),
    ("guided_grammar", "use structured_outputs.grammar"),
    ("guided_decoding_backend", "there is one backend"),
    ("guided_whitespace_pattern", "JSON has at most one space or one line break with indentation between its parts"),
    ("structural_tag", "use structured_outputs.grammar"),
    ("grammar", "use structured_outputs.grammar"),
];

impl StructuredOutput {
    /// Reads the constraint of a request, if it has one.
    pub(crate) fn read(fields: &mut Fields) -> Result<Option<StructuredOutput>, ApiError> {
        for (name, why) in RENAMED {
            fields.refuse(name, |_| false, why)?;
        }
        let format = match fields.take("response_format") {
            None => None,
            Some(value) => read_format(Fields::within(fields.path("response_format"), value)?)?,
        };
        let outputs = match fields.take("structured_outputs") {
            None => None,
            Some(value) => Some(read_outputs(Fields::within(fields.path("structured_outputs"), value)?)?),
        };
        match (format, outputs) {
            (Some(_), Some(_)) => {
                let message = "structured_outputs cannot be combined with response_format: give one of them";
                Err(ApiError::field("structured_outputs", message))
            }
            (format, outputs) => Ok(format.or(outputs)),
        }
    }

    /// Compiles the constraint for a model, within the cache of a tenant. Takes long.
    pub(crate) fn compile(
        &self,
        model: &LoadedModel,
        tenant: &Tenant,
        beam_width: Option<usize>,
    ) -> Result<Arc<dyn TokenConstraint>, ApiError> {
        let StructuredOutput { source, param } = self;
        if beam_width.is_some() {
            return Err(ApiError::field(param, format!("{param}: beam search cannot be combined with a grammar")));
        }
        match model.grammar(tenant.id, source.clone()) {
            Ok(grammar) => Ok(grammar),
            Err(error @ GrammarError::NoThread) => {
                Err(ApiError::unavailable("no_thread", error.to_string(), RETRY_SOON_S))
            }
            Err(error) => Err(ApiError::field(param, format!("{param}: {error}")).code("invalid_grammar")),
        }
    }
}

/// Reads OpenAI's `response_format`; `text` is no constraint.
fn read_format(mut fields: Fields) -> Result<Option<StructuredOutput>, ApiError> {
    let kind_path = fields.path("type");
    let kind = fields::string(&kind_path, fields.required("type")?, MAX_WORD_LEN)?;
    let output = match kind.as_str() {
        "text" => None,
        "json_object" => Some(StructuredOutput { source: GrammarSource::JsonObject, param: "response_format".into() }),
        "json_schema" => {
            let path = fields.path("json_schema");
            Some(read_schema(Fields::within(path, fields.required("json_schema")?)?)?)
        }
        other => {
            let message = format!("{kind_path}: expected text, json_object or json_schema, found {}", shown(other));
            return Err(ApiError::field(kind_path, message).code("unsupported_value"));
        }
    };
    fields.finish()?;
    Ok(output)
}

/// Reads the object `json_schema`. `strict` changes nothing: every reply satisfies the schema.
fn read_schema(mut fields: Fields) -> Result<StructuredOutput, ApiError> {
    let path = fields.path("name");
    let name = fields::string(&path, fields.required("name")?, MAX_WORD_LEN)?;
    if name.is_empty() || !name.chars().all(|c| c.is_ascii_alphanumeric() || "_-".contains(c)) {
        let message = format!("{path}: expected letters, digits, _ and -, found {}", shown(&name));
        return Err(ApiError::field(path, message));
    }
    fields.string("description", MAX_DESCRIPTION_LEN)?;
    fields.boolean("strict")?;
    let param = fields.path("schema");
    let schema = match fields.required("schema")? {
        value @ Json::Object(_) => value.into_value(),
        other => return Err(fields::wrong_type(&param, "an object", &other)),
    };
    fields.finish()?;
    Ok(StructuredOutput { source: GrammarSource::JsonSchema(schema), param })
}

/// Reads vLLM's `structured_outputs`, which has exactly one constraint.
fn read_outputs(mut fields: Fields) -> Result<StructuredOutput, ApiError> {
    let all = "json, json_object, regex, grammar or choice";
    let mut given: Vec<StructuredOutput> = Vec::new();
    let path = fields.path("json");
    if let Some(value) = fields.take("json") {
        let schema = match value {
            Json::String(text) if text.len() <= MAX_SOURCE_BYTES => {
                let parsed = Json::parse(text.as_bytes()).map_err(|error| error.of("schema in json").param(&path))?;
                parsed.into_value()
            }
            value @ (Json::Object(_) | Json::Bool(_)) => value.into_value(),
            other => return Err(fields::wrong_type(&path, "a schema, as an object or as text", &other)),
        };
        given.push(StructuredOutput { source: GrammarSource::JsonSchema(schema), param: path });
    }
    let path = fields.path("json_object");
    if fields.boolean("json_object")? == Some(true) {
        given.push(StructuredOutput { source: GrammarSource::JsonObject, param: path });
    }
    for (name, source) in [("regex", GrammarSource::Regex as fn(String) -> _), ("grammar", GrammarSource::Grammar)] {
        if let Some(text) = fields.string(name, MAX_SOURCE_BYTES)? {
            given.push(StructuredOutput { source: source(text), param: fields.path(name) });
        }
    }
    let path = fields.path("choice");
    if let Some(values) = fields.array("choice", MAX_GRAMMAR_CHOICES)? {
        let texts = values.into_iter().map(|value| fields::string(&path, value, MAX_SOURCE_BYTES));
        given.push(StructuredOutput { source: GrammarSource::Choice(texts.collect::<Result<_, _>>()?), param: path });
    }
    fields.finish()?;
    match given.len() {
        1 => Ok(given.remove(0)),
        found => {
            let message = format!("structured_outputs: expected one of {all}, found {found} of them");
            Err(ApiError::field("structured_outputs", message))
        }
    }
}
