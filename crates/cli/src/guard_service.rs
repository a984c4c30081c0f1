//! A guard that asks an HTTP service, which the operator names with `--guard-url`.
//!
//! One `POST` for each verdict, with the texts as JSON; the service answers `{"verdict": "pass"}` or
//! `{"verdict": "block", "rule": "..."}`. Every other answer is a failure of the guard. Redirects are not followed.

use std::time::Duration;

use pellucid_generate::{Guard, GuardError, PromptText, ReplyText, Turn, Verdict};
use serde::Deserialize;
use serde_json::{Value, json};
use ureq::Agent;

use crate::http_error::sentence;

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

    fn ask(&self, question: &Value, prompt: &PromptText) -> Result<Verdict, GuardError> {
        let failed = |error| GuardError(format!("no verdict: {}", sentence(&error, "the service")));
        let mut request = self.agent.post(&self.url);
        if let Some(traceparent) = &prompt.traceparent {
            request = request.header("traceparent", &**traceparent);
        }
        let mut answer = request.send_json(question).map_err(failed)?;
        let status = answer.status();
        if !status.is_success() {
            return Err(GuardError(format!("the service answered with status {}", status.as_u16())));
        }
        let answer = answer.body_mut().with_config().limit(MAX_ANSWER_BYTES).read_to_vec().map_err(failed)?;
        let answer: Answer = serde_json::from_slice(&answer).map_err(|_| {
            let expected = r#"expected JSON such as {"verdict": "pass"} or {"verdict": "block", "rule": "..."}"#;
            GuardError(format!("the answer of the service is not a verdict: {expected}"))
        })?;
        match answer.verdict.as_str() {
            "pass" => Ok(Verdict::Pass),
            "block" => Ok(Verdict::Block(answer.rule)),
            other => {
                let found: String = other.chars().take(40).collect();
                Err(GuardError(format!("the service answered with verdict {found:?}, expected pass or block")))
            }
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
        self.ask(&json!({ "subject": "prompt", "messages": messages(&prompt.turns) }), prompt)
    }

    fn judge_reply(&self, prompt: &PromptText, reply: &ReplyText) -> Result<Verdict, GuardError> {
        let question = json!({
            "subject": "reply",
            "messages": messages(&prompt.turns),
            "reply": { "reasoning": reply.thoughts, "content": reply.answer, "tool_calls": reply.calls },
            "is_complete": reply.is_complete,
        });
        self.ask(&question, prompt)
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
        PromptText {
            scope: pellucid_engine::Scope::of(pellucid_engine::TenantId(0)),
            text: "hello".into(),
            turns,
            traceparent: None,
        }
    }

    #[test]
    fn answers_are_verdicts_and_everything_else_is_a_failure_in_our_words() {
        const HEAD: &str = "HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nConnection: close\r\n";
        let long = format!("\"{}\"", "a".repeat(MAX_ANSWER_BYTES as usize));
        let no_verdict = "the answer of the service is not a verdict: expected JSON such as";
        for (head, body, expected) in [
            (HEAD, r#"{"verdict": "pass"}"#, Ok(Verdict::Pass)),
            (HEAD, r#"{"verdict": "block", "rule": "S1", "more": 1}"#, Ok(Verdict::Block("S1".into()))),
            (HEAD, r#"{"verdict": "maybe"}"#, Err(r#"verdict "maybe", expected pass or block"#)),
            (HEAD, "[]", Err(no_verdict)),
            (HEAD, "<html>", Err(no_verdict)),
            (HEAD, r#"{"verdict": 5}"#, Err(no_verdict)),
            (HEAD, &long, Err("no verdict: the service sent an answer of more than 65536 bytes")),
            ("HTTP/1.1 500 Oops\r\nConnection: close\r\n", r#"{"verdict": "pass"}"#, Err("with status 500")),
            ("HTTP/1.1 302 Found\r\nLocation: /other\r\nConnection: close\r\n", "", Err("with status 302")),
            ("SSH-2.0-Server\r\n", "", Err("no verdict: the service sent an answer that is not HTTP")),
        ] {
            let answer: &'static str = format!("{head}Content-Length: {}\r\n\r\n{body}", body.len()).leak();
            let (asked, question) = std::sync::mpsc::channel();
            let service = answering(answer, asked);
            let reply = ReplyText { answer: "no".into(), is_complete: true, ..ReplyText::default() };
            let found = service.judge_reply(&prompt(), &reply);
            match expected {
                Ok(verdict) => assert_eq!(found.unwrap(), verdict, "{head}{body}"),
                Err(words) => assert!(failure(found).contains(words), "{head}: {}", &body[..body.len().min(80)]),
            }
            let question = question.recv().unwrap();
            assert_eq!(question["messages"], json!([{ "role": "user", "content": "hello" }]));
            assert_eq!((&question["reply"]["content"], &question["is_complete"]), (&json!("no"), &json!(true)));
        }
        let (asked, _question) = std::sync::mpsc::channel();
        let late = answering("", asked).judge_prompt(&prompt());
        assert_eq!(failure(late), "no verdict: the service did not answer in time");
    }

    #[test]
    fn a_service_that_cannot_be_reached_is_a_failure_in_our_words() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = listener.local_addr().unwrap();
        std::thread::spawn(move || {
            let (mut stream, _) = listener.accept().unwrap();
            let _ = stream.write_all(b"HTTP/1.1 400 Bad Request\r\n\r\n");
        });
        let judged = |url: String| failure(GuardService::new(url, Duration::from_secs(20)).judge_prompt(&prompt()));
        assert_eq!(
            judged(format!("https://{address}/judge")),
            "no verdict: no secure connection to the service: it does not speak TLS as https needs it"
        );
        assert_eq!(judged(format!("http://{address}/judge")), "no verdict: the service refused the connection");
    }

    /// Returns the reason of a failure, which has no words of the HTTP library.
    #[track_caller]
    fn failure(found: Result<Verdict, GuardError>) -> String {
        let GuardError(reason) = found.unwrap_err();
        for words in ["io: ", "json: ", "timeout: ", "protocol: ", "http: ", "rustls", "line 1 column", "limit: "] {
            assert!(!reason.contains(words), "{words:?} in {reason}");
        }
        reason
    }
}
