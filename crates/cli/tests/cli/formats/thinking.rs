//! `run` and `explain` with a chat template whose model thinks, through the built program.

use crate::support::{Home, Ran};
use serde_json::Value;

/// Begins the thoughts in the prompt, unless thinking is off.
const TEMPLATE: &str = "{% for m in messages %}{{ m.content }}{% if m.role == 'assistant' %}\
    {{ m.content.split('</think>')[-1] }}{% endif %}\n{% endfor %}\
    {% if enable_thinking is defined and not enable_thinking %}<think></think>{% else %}<think>\n{% endif %}";

struct Thinker {
    home: Home,
    template: String,
}

impl Thinker {
    fn new() -> Thinker {
        let home = Home::new();
        let path = home.path().join("thinking.jinja");
        std::fs::write(&path, TEMPLATE).unwrap();
        Thinker { template: path.to_str().unwrap().to_owned(), home }
    }

    fn run(&self, command: &str, more: &[&str]) -> Ran {
        let base = [command, "--model", "tiny", "Once upon a time", "--chat-template", &self.template];
        self.home.run(&[&base, more].concat())
    }

    fn report(&self, more: &[&str]) -> Value {
        serde_json::from_str(self.run("run", &[&["--json", "--seed", "7", "-n", "60"], more].concat()).ok()).unwrap()
    }
}

#[test]
fn thoughts_are_apart_from_the_answer_and_have_a_budget() {
    let thinker = Thinker::new();
    let report = thinker.report(&["--thinking-budget", "5"]);
    let (thoughts, text) = (report["thoughts"].as_str().unwrap(), report["text"].as_str().unwrap());
    assert!(!thoughts.is_empty() && !text.is_empty(), "{report}");
    assert!(!text.contains("think>") && !thoughts.contains("think>"), "{report}");
    let num_thought = report["tokens"]["thoughts"].as_u64().unwrap();
    assert!((5..30).contains(&num_thought), "{report}");
    // Without a budget, the tiny model never ends its thoughts.
    let free = thinker.report(&[]);
    assert!(free["thoughts"].as_str().unwrap().starts_with(thoughts), "{free}");
    assert_eq!(free["text"], "", "{free}");
    // Without thoughts, the reply is the answer.
    let off = thinker.report(&["--reasoning-effort", "none"]);
    assert_eq!((off["thoughts"].as_str(), off["tokens"]["thoughts"].as_u64()), (Some(""), Some(0)), "{off}");
    assert!(!off["text"].as_str().unwrap().is_empty(), "{off}");
}

#[test]
fn a_grammar_applies_to_the_answer() {
    let thinker = Thinker::new();
    let report = thinker.report(&["--thinking-budget", "8", "--regex", "[0-9]{3}!"]);
    let text = report["text"].as_str().unwrap();
    assert!(text.len() == 4 && text.ends_with('!') && text[..3].bytes().all(|b| b.is_ascii_digit()), "{report}");
    assert!(!report["thoughts"].as_str().unwrap().is_empty(), "{report}");
}

#[test]
fn a_pipe_gets_the_answer_alone() {
    let thinker = Thinker::new();
    let flags = ["--thinking-budget", "5", "--seed", "7", "-n", "60"];
    let report = thinker.report(&["--thinking-budget", "5"]);
    let ran = thinker.run("run", &flags);
    assert_eq!(ran.ok().trim_end(), report["text"].as_str().unwrap().trim_end());
    assert!(ran.stderr.contains("tokens of thoughts are not shown"), "{}", ran.stderr);
}

#[test]
fn explain_shows_the_forced_end_of_the_thoughts() {
    let thinker = Thinker::new();
    let ran = thinker.run("explain", &["--thinking-budget", "1", "--max-tokens", "3"]);
    assert!(ran.ok().contains("which have reached thinking_budget"), "{}", ran.ok());
}

#[test]
fn flags_without_effect_are_errors_of_usage() {
    let thinker = Thinker::new();
    let problem = |more: &[&str]| {
        let ran = thinker.home.run(&[&["run", "--model", "tiny", "Once"], more].concat());
        assert_eq!(ran.status, Some(2), "{}", ran.stderr);
        ran.stderr
    };
    assert!(problem(&["--reasoning-effort", "much"]).contains("--reasoning-effort"));
    assert!(problem(&["--reasoning-effort", "low", "--raw"]).contains("no effect with --raw"));
    assert!(problem(&["--thinking-budget", "5", "--beams", "2"]).contains("--beams cannot be combined"));
    let plain = thinker.home.path().join("plain.jinja");
    std::fs::write(&plain, "{% for m in messages %}{{ m.content }}{% endfor %}").unwrap();
    let plain = plain.to_str().unwrap();
    let error = problem(&["--reasoning-effort", "low", "--chat-template", plain]);
    assert!(error.contains("the model's chat template has no setting of its reasoning"), "{error}");
    let error = problem(&["--thinking-budget", "5", "--chat-template", plain]);
    assert!(error.contains("--thinking-budget: this model's chat template has no thoughts"), "{error}");
}
