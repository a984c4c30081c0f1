//! Calls that a reader can copy: for the shell, and for OpenAI's clients for Python and JavaScript.
//!
//! The model's name may hold any character. It is quoted for the language of each example, so that a copied example
//! cannot do anything but call the server.

use serde_json::{Value, json};

const QUESTION: &str = "Why is the sky blue?";

/// The values of the examples.
#[derive(Debug)]
pub(super) struct Examples<'a> {
    /// Scheme, host and port.
    pub(super) base_url: &'a str,
    pub(super) model: &'a str,
    pub(super) needs_key: bool,
    /// Whether the model can chat; otherwise the examples continue a text.
    pub(super) can_chat: bool,
}

/// Returns text as a string literal, which JSON, Python and JavaScript share.
fn literal(text: &str) -> String {
    Value::from(text).to_string()
}

/// Returns text as one word of a shell.
fn shell_word(text: &str) -> String {
    format!("'{}'", text.replace('\'', "'\\''"))
}

/// Returns a body with one field a line.
fn body_text(body: &Value) -> String {
    let fields = body.as_object().into_iter().flatten();
    let fields: Vec<String> = fields.map(|(name, value)| format!("    {}: {value}", literal(name))).collect();
    format!("{{\n{}\n  }}", fields.join(",\n"))
}

/// Returns a call of a route with a body, for the shell.
pub(super) fn curl(base_url: &str, path: &str, body: Option<&Value>, needs_key: bool) -> String {
    let mut command = format!("curl {base_url}{path}");
    if needs_key {
        command += " \\\n  -H \"Authorization: Bearer $PELLUCID_API_KEY\"";
    }
    if let Some(body) = body {
        command += &format!(" \\\n  -H 'Content-Type: application/json' \\\n  -d {}", shell_word(&body_text(body)));
    }
    command
}

impl Examples<'_> {
    pub(super) fn shell(&self) -> String {
        let messages = json!([{ "role": "user", "content": QUESTION }]);
        let (path, body) = match self.can_chat {
            true => ("/v1/chat/completions", json!({ "model": self.model, "messages": messages })),
            false => ("/v1/completions", json!({ "model": self.model, "prompt": "The sky is", "max_tokens": 32 })),
        };
        curl(self.base_url, path, Some(&body), self.needs_key)
    }

    /// Returns a call of a server that computes vectors only.
    pub(super) fn embeddings_shell(&self) -> String {
        let body = json!({ "model": self.model, "input": ["The sky is blue.", "Grass is green."] });
        curl(self.base_url, "/v1/embeddings", Some(&body), self.needs_key)
    }

    pub(super) fn python(&self) -> String {
        let model = literal(self.model);
        let base_url = literal(&format!("{}/v1", self.base_url));
        let (import, key) = match self.needs_key {
            true => ("import os\n\n", "os.environ[\"PELLUCID_API_KEY\"]"),
            false => ("", "\"unused\""),
        };
        let client =
            format!("{import}from openai import OpenAI\n\nclient = OpenAI(base_url={base_url}, api_key={key})\n");
        let call = match self.can_chat {
            true => format!(
                "reply = client.chat.completions.create(\n    model={model},\n    \
                 messages=[{{\"role\": \"user\", \"content\": {}}}],\n)\nprint(reply.choices[0].message.content)",
                literal(QUESTION)
            ),
            false => format!(
                "reply = client.completions.create(model={model}, prompt=\"The sky is\", max_tokens=32)\n\
                 print(reply.choices[0].text)"
            ),
        };
        client + &call
    }

    pub(super) fn javascript(&self) -> String {
        let model = literal(self.model);
        let base_url = literal(&format!("{}/v1", self.base_url));
        let key = if self.needs_key { "process.env.PELLUCID_API_KEY" } else { "\"unused\"" };
        let client = format!(
            "import OpenAI from \"openai\";\n\nconst client = new OpenAI({{ baseURL: {base_url}, apiKey: {key} }});\n"
        );
        let call = match self.can_chat {
            true => format!(
                "const stream = await client.chat.completions.create({{\n  model: {model},\n  \
                 messages: [{{ role: \"user\", content: {} }}],\n  stream: true,\n}});\n\
                 for await (const chunk of stream) {{\n  \
                 process.stdout.write(chunk.choices[0]?.delta?.content ?? \"\");\n}}",
                literal(QUESTION)
            ),
            false => format!(
                "const reply = await client.completions.create({{\n  model: {model},\n  prompt: \"The sky is\",\n  \
                 max_tokens: 32,\n}});\nconsole.log(reply.choices[0].text);"
            ),
        };
        client + &call
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_hostile_name_stays_a_string() {
        let model = "a'; rm -rf ~; echo \"$(id)`id`\\\n";
        let examples = Examples { base_url: "http://localhost", model, needs_key: false, can_chat: true };
        // In the shell everything between single quotes is literal.
        let shell = examples.shell();
        let (_, body) = shell.split_once("-d '").unwrap();
        let body = body.strip_suffix('\'').unwrap().replace("'\\''", "\u{1}");
        assert!(!body.contains('\''), "{shell}");
        let body: Value = serde_json::from_str(&body.replace('\u{1}', "'")).unwrap();
        assert_eq!(body["model"], model);
        let quoted = r#""a'; rm -rf ~; echo \"$(id)`id`\\\n""#;
        assert!(examples.python().contains(&format!("model={quoted},")), "{}", examples.python());
        assert!(examples.javascript().contains(&format!("model: {quoted},")), "{}", examples.javascript());
    }
}
