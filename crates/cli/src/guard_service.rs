//! A guard that asks an HTTP service, which the operator names with `--guard-url`.
//!
//! One `POST` for each verdict, with the texts as JSON; the service answers `{"verdict": "pass"}` or
//! `{"verdict": "block", "rule": "..."}`. Every other answer is a failure of the guard. Redirects are not followed.

use std::time::Duration;

use pellucid_generate::{Guard, GuardError, PromptText, ReplyText, Turn, Verdict};
use serde::Deserialize;
use serde_json::{Value, json};
use ureq::Agent;

/// Maximum bytes of an answer.
const MAX_ANSWER_BYTES: u64 = 64 << 10;

#[derive(Debug)]
pub(crate) struct GuardService {
    agent: Agent,
    url: String,
}

/// The answer of a service. Further fields are ignored.
#[derive(Deserialize)]
struct Answer {
    verdict: String,
    #[serde(default)]
    rule: String,
}

impl GuardService {
    pub(crate) fn new(url: String, timeout: Duration) -> GuardService {
        let config = Agent::config_builder()
            .http_status_as_error(false)
            .max_redirects(0)
            .max_redirects_will_error(false)
            .user_agent(concat!("pellucid/", env!("CARGO_PKG_VERSION")))
            .timeout_global(Some(timeout))
            .build();
        GuardService { agent: config.new_agent(), url }
    }

    fn ask(&self, question: &Value) -> Result<Verdict, GuardError> {
        let failed = |error: ureq::Error| GuardError(format!("the service gave no verdict: {error}"));
        let mut answer = self.agent.post(&self.url).send_json(question).map_err(failed)?;
        let status = answer.status();
        if !status.is_success() {
            return Err(GuardError(format!("the service answered with status {}", status.as_u16())));
        }
        let answer: Answer = answer.body_mut().with_config().limit(MAX_ANSWER_BYTES).read_json().map_err(failed)?;
        match answer.verdict.as_str() {
            "pass" => Ok(Verdict::Pass),
            "block" => Ok(Verdict::Block(answer.rule)),
            other => Err(GuardError(format!("verdict: expected pass or block, found {other:?}"))),
        }
    }
}

fn messages(turns: &[Turn]) -> Vec<Value> {
    turns.iter().map(|turn| json!({ "role": turn.role, "content": turn.text })).collect()
}

impl Guard for GuardService {
    fn name(&self) -> &'static str {
        "http"
    }

    fn judge_prompt(&self, prompt: &PromptText) -> Result<Verdict, GuardError> {
        self.ask(&json!({ "subject": "prompt", "messages": messages(&prompt.turns) }))
    }

    fn judge_reply(&self, prompt: &PromptText, reply: &ReplyText) -> Result<Verdict, GuardError> {
        self.ask(&json!({
            "subject": "reply",
            "messages": messages(&prompt.turns),
            "reply": { "reasoning": reply.thoughts, "content": reply.answer, "tool_calls": reply.calls },
            "is_complete": reply.is_complete,
        }))
    }
}

#[cfg(test)]
mod tests {
    use std::io::{BufRead, BufReader, Read, Write};
    use std::net::TcpListener;

    use super::*;

    /// Answers one request with `answer` and returns the service's guard; the request's body goes to `asked`.
    fn answering(answer: &'static str, asked: std::sync::mpsc::Sender<Value>) -> GuardService {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let url = format!("http://{}/judge", listener.local_addr().unwrap());
        std::thread::spawn(move || {
            let (mut stream, _) = listener.accept().unwrap();
            let mut reader = BufReader::new(stream.try_clone().unwrap());
            let (mut line, mut length) = (String::new(), 0);
            while reader.read_line(&mut line).unwrap() > 2 {
                if let Some(value) = line.to_ascii_lowercase().strip_prefix("content-length:") {
                    length = value.trim().parse().unwrap();
                }
                line.clear();
            }
            let mut body = vec![0; length];
            reader.read_exact(&mut body).unwrap();
            asked.send(serde_json::from_slice(&body).unwrap()).unwrap();
            if answer.is_empty() {
                // Never answers: the guard has to give up.
                std::thread::sleep(Duration::from_secs(5));
            }
            stream.write_all(answer.as_bytes()).unwrap();
        });
        GuardService::new(url, Duration::from_millis(if answer.is_empty() { 200 } else { 20_000 }))
    }

    fn prompt() -> PromptText {
        let turns = vec![Turn { role: "user".into(), text: "hello".into() }];
        PromptText { scope: pellucid_engine::Scope::of(pellucid_engine::TenantId(0)), text: "hello".into(), turns }
    }

    #[test]
    fn answers_are_verdicts_and_everything_else_is_a_failure() {
        const HEAD: &str = "HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nConnection: close\r\n";
        for (head, body, expected) in [
            (HEAD, r#"{"verdict": "pass"}"#, Some(Verdict::Pass)),
            (HEAD, r#"{"verdict": "block", "rule": "S1", "more": 1}"#, Some(Verdict::Block("S1".into()))),
            (HEAD, r#"{"verdict": "maybe"}"#, None),
            (HEAD, "[]", None),
            ("HTTP/1.1 500 Oops\r\nConnection: close\r\n", r#"{"verdict": "pass"}"#, None),
            ("HTTP/1.1 302 Found\r\nLocation: /other\r\nConnection: close\r\n", "", None),
        ] {
            let answer: &'static str = format!("{head}Content-Length: {}\r\n\r\n{body}", body.len()).leak();
            let (asked, question) = std::sync::mpsc::channel();
            let service = answering(answer, asked);
            let reply = ReplyText { answer: "no".into(), is_complete: true, ..ReplyText::default() };
            assert_eq!(service.judge_reply(&prompt(), &reply).ok(), expected, "{head}{body}");
            let question = question.recv().unwrap();
            assert_eq!(question["messages"], json!([{ "role": "user", "content": "hello" }]));
            assert_eq!((&question["reply"]["content"], &question["is_complete"]), (&json!("no"), &json!(true)));
        }
        let (asked, _question) = std::sync::mpsc::channel();
        assert!(answering("", asked).judge_prompt(&prompt()).is_err(), "a service that is late");
    }
}
