//! Requests of other APIs become requests of OpenAI's: a body in OpenAI's names, which is read, checked and answered
//! like any other. Errors name the fields that the client sent.

pub(crate) mod llama_options;

use pellucid_generate::LoadedModel;

use crate::http::error::ApiError;
use crate::http::json::Json;
use crate::openai::chat::ChatRequest;
use crate::openai::completions::CompletionRequest;
use crate::reply::Spec;

/// The body of a request in OpenAI's names, with the names under which the client sent its values.
#[derive(Debug, Default)]
pub(crate) struct ChatBody {
    entries: Vec<(String, Json)>,
    messages: Vec<Json>,
    paths: Paths,
}

impl ChatBody {
    /// Sets a field that the client sent as `source`. `None` sets nothing.
    pub(crate) fn set(&mut self, name: &str, value: Option<Json>, source: &str) {
        if let Some(value) = value {
            self.entries.push((name.to_owned(), value));
            self.paths.add(name, source);
        }
    }

    /// Whether a field was set.
    pub(crate) fn has(&self, name: &str) -> bool {
        self.entries.iter().any(|(key, _)| key == name)
    }

    /// Adds a message that the client sent as `source`.
    pub(crate) fn message(&mut self, message: Json, source: &str) {
        self.paths.add(&format!("messages[{}]", self.messages.len()), source);
        self.messages.push(message);
    }

    /// Notes that the part of the last message at `path` was sent as `source`.
    pub(crate) fn part_of_last(&mut self, path: &str, source: &str) {
        let last = self.messages.len().saturating_sub(1);
        self.paths.add(&format!("messages[{last}].{path}"), source);
    }

    /// Notes that the client sent the value at `path` as `source`.
    pub(crate) fn rename(&mut self, path: &str, source: &str) {
        self.paths.add(path, source);
    }

    /// Returns the role of the last message.
    pub(crate) fn last_role(&self) -> Option<&str> {
        let Json::Object(entries) = self.messages.last()? else { return None };
        entries.iter().find_map(|(name, value)| match value {
            Json::String(role) if name == "role" => Some(role.as_str()),
            _ => None,
        })
    }

    /// Returns the last message.
    pub(crate) fn last_message(&mut self) -> Option<&mut Json> {
        self.messages.last_mut()
    }

    /// Reads the body as a chat request, and returns the names for errors that are found later.
    pub(crate) fn read_chat(mut self, model: &LoadedModel) -> Result<(ChatRequest, Paths), ApiError> {
        self.entries.push(("messages".into(), Json::Array(self.messages)));
        match ChatRequest::read(Json::Object(self.entries), model) {
            Ok(request) => Ok((request, self.paths)),
            Err(error) => Err(self.paths.translate(error)),
        }
    }

    /// Reads the body as a request to continue a text.
    pub(crate) fn read_completion(self, model: &LoadedModel) -> Result<(CompletionRequest, Paths), ApiError> {
        match CompletionRequest::read(Json::Object(self.entries), model) {
            Ok(request) => Ok((request, self.paths)),
            Err(error) => Err(self.paths.translate(error)),
        }
    }
}

/// Paths in OpenAI's request, each with the path of the same value in the request that the client sent.
#[derive(Debug, Default)]
pub(crate) struct Paths(Vec<(String, String)>);

impl Paths {
    fn add(&mut self, path: &str, source: &str) {
        if path != source {
            self.0.push((path.to_owned(), source.to_owned()));
        }
    }

    /// Returns the name under which the client sent the value at a path; `None` if it is the same.
    fn source_of(&self, path: &str) -> Option<String> {
        let rest_of = |known: &str| match path.strip_prefix(known)? {
            rest if rest.is_empty() || rest.starts_with(['.', '[']) => Some(rest),
            _ => None,
        };
        let best = self.0.iter().filter_map(|(known, source)| Some((known, source, rest_of(known)?)));
        let (_, source, rest) = best.max_by_key(|(known, ..)| known.len())?;
        Some(format!("{source}{rest}"))
    }

    /// Returns a checked request, or its error, with the client's own names.
    pub(crate) fn translate_spec(&self, spec: Result<Spec, ApiError>) -> Result<Spec, ApiError> {
        let mut spec = spec.map_err(|error| self.translate(error))?;
        let named = |path: &String| self.source_of(path).unwrap_or_else(|| path.clone());
        spec.not_enforced = spec.not_enforced.iter().map(named).collect();
        Ok(spec)
    }

    /// Returns an error with the client's own names.
    pub(crate) fn translate(&self, mut error: ApiError) -> ApiError {
        let Some(param) = &error.detail.param else { return error };
        let Some(named) = self.source_of(param) else { return error };
        error.detail.message = error.detail.message.replacen(param.as_str(), &named, 1);
        error.detail.param = Some(named);
        error
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn errors_name_what_the_client_sent() {
        let mut paths = Paths::default();
        paths.add("messages[0]", "system");
        paths.add("messages[1]", "messages[0]");
        paths.add("messages[1].content[0]", "messages[0].content[2]");
        paths.add("stop", "stop_sequences");
        paths.add("seed", "seed");
        for (param, message, expected_param, expected) in [
            ("messages[0].content", "messages[0].content: expected a", "system.content", "system.content: expected a"),
            ("messages[1].role", "messages[1].role is b", "messages[0].role", "messages[0].role is b"),
            ("messages[1].content[0].text", "no", "messages[0].content[2].text", "no"),
            ("messages[10]", "messages[10] is c", "messages[10]", "messages[10] is c"),
            ("stop", "stop: too many", "stop_sequences", "stop_sequences: too many"),
            ("stopping", "stopping: d", "stopping", "stopping: d"),
        ] {
            let error = paths.translate(ApiError::field(param, message));
            assert_eq!((error.detail.param.as_deref(), &*error.detail.message), (Some(expected_param), expected));
        }
        assert_eq!(paths.translate(ApiError::invalid("e")), ApiError::invalid("e"));
    }
}
