//! The command line as a user types it: exit statuses, wording of errors, MODEL and PROMPT, standard input and files.

use std::io::{BufRead, BufReader, Read};
use std::net::TcpListener;
use std::process::{Child, Command, Stdio};
use std::sync::mpsc;
use std::time::Duration;

use crate::support::tiny_model::{TEMPLATE, tiny_model};
use crate::support::{Home, Ran};

/// Words of libraries and of the operating system that no message contains.
const LIBRARY_WORDS: [&str; 11] = [
    "invalid digit",
    "float literal",
    "os error",
    "is not in ",
    "TOML parse error",
    "at line",
    "panicked",
    "target type",
    "serde",
    "valid UTF-8",
    "invalid uri",
];

#[test]
fn wrong_usage_exits_with_2_in_the_words_of_this_program() {
    let home = Home::new();
    let model = tiny_model(&home, Some(TEMPLATE));
    let no_toml = home.path().join("bad.toml");
    std::fs::write(&no_toml, "port = 1\nx = [").unwrap();
    let no_toml = no_toml.to_str().unwrap();
    let [questions, tasks] = ["questions", "tasks"].map(|name| format!("--{name}={no_toml}"));
    let folder = home.path().join("no-model");
    std::fs::create_dir(&folder).unwrap();
    let folder = folder.to_str().unwrap();
    let [lark, cut] = ["g.lark", "cut.json"].map(|name| home.path().join(name));
    std::fs::write(&lark, "start: foo\n").unwrap();
    std::fs::write(&cut, "{\"a\":\n").unwrap();
    let [lark, cut] = [&lark, &cut].map(|path| path.to_str().unwrap());
    let cases: [(&[&str], &str); 71] = [
        (&["run", "hi", "-m", "tiny", "--grammar", lark], "--grammar: the grammar: line 1, column 8: no rule or token"),
        (
            &["run", "hi", "-m", "tiny", "--json-schema", cut],
            "cut.json, line 1, column 5: this is not JSON: the text ends",
        ),
        (&["run", "hi", "-m", "tiny", "--tools", cut], "cut.json, line 1, column 5: this is not JSON: the text ends"),
        (&["run", "hi", "-m", &model, "-n", "-1"], "'--max-tokens <TOKENS>': expected 1 or more"),
        (&["run", "hi", "-m", &model, "--choices", "-1"], "'--choices <N>': expected a whole number"),
        (&["explain", "hi", "-m", &model, "--candidates", "-3"], "'--candidates <N>': expected 1 to 20"),
        (&["bench", &model, "--threads=-2"], "'--threads <N>': expected 1 to 1024"),
        (&["serve", "-m", &model, "--port", "-1"], "'--port <PORT>': expected 0 to 65535"),
        (&["run", "hi", "-m", &model, "--context", "x"], "expected a whole number"),
        (&["run", "hi", "-m", &model, "--context", "99999999999999999999999"], "'--context <TOKENS>': "),
        (&["run", "hi", "-m", &model, "--temperature", "hot"], "'--temperature <T>': expected a number"),
        (&["run", "hi", "-m", &model, "--temperature", "-1"], "--temperature: expected 0 to 100, found -1"),
        (&["run", "hi", "-m", &model, "--threads", "0"], "'--threads <N>': expected 1 to 1024"),
        (&["run", "hi", "-m", &model, "-n", "0"], "expected 1 or more"),
        (&["run", "hi", "-m", &model, "--seed", "-1"], "'--seed <N>': expected a whole number"),
        (&["run", "hi", "-m", &model, "--context", "9999"], "--context: "),
        (&["run", "hi", "-m", &model, "--stop", ""], "--stop: expected a text"),
        (&["run", "hi", "-m", &model, "--best-of", "2", "--choices", "3"], "--best-of (2)"),
        (&["run", "hi", "-m", &model, "--beams", "1"], "--beams: expected 2 to 128"),
        (&["run", "hi", "-m", &model, "--cpu-isa", "neon,"], "neon,"),
        (&["run", "hi", "-m", &model, "--no-such-flag"], "--no-such-flag"),
        (&["run", "hi", "-m", "no-such-model"], "there is no model `no-such-model`"),
        (&["run", "hi", "-m", "models/none.gguf"], "there is no file `models/none.gguf`"),
        (&["run", "hi", "-m", &model, "--file", "none.txt"], "there is no file none.txt"),
        (&["run", "  ", "-m", &model], "the prompt is empty"),
        (&["run", "-m", &model], "standard input is empty"),
        (&["run", "--page", "-m", &model, "hi"], "--page takes no PROMPT"),
        (&["run", "--page", "-m", &model, "--top-k", "3"], "--page cannot be combined with --top-k"),
        (&["run", "-m", &model, "--json"], "standard input is empty"),
        (&["explain", "hi", "-m", &model, "--top-p", "7"], "--top-p: expected 0 to 1, found 7"),
        (&["inspect", "no-such-model"], "there is no model"),
        (&["tokenize", "no-such-model"], "there is no model"),
        (&["perplexity", &model, "none.txt"], "none.txt"),
        (&["perplexity", &model, no_toml, "--window", "9999"], "tokens, fewer than"),
        (&["prove", &model, "--longest", "9999"], "--longest and --reply need"),
        (&["bench", &model, "--write", "x"], "--write applies to random weights"),
        (&["quantize", "no-such-model", "out.gguf", "--type", "q8_0"], "there is no model"),
        (&["pull", "word"], "`word` is not a model name"),
        (&["rm", "no-such-model"], "there is no model"),
        (&["serve", "--port", "99999"], "'--port <PORT>': expected 0 to 65535"),
        (&["serve", "-m", &model, "--keys-file", "none.toml"], "--keys-file: there is no file none.toml"),
        (&["serve", "-m", &model, "--host", "0.0.0.0"], "there are no keys"),
        (&["serve", "--config", no_toml], "bad.toml, line 2, column 6: this is not TOML; expected a name"),
        (&["serve", "-m", &model, "--model-settings", no_toml], "bad.toml, line 2, column 6: this is not TOML"),
        (&["bench", &model, &questions], "bad.toml, line 2, column 6: this is not TOML; expected `[[question]]`"),
        (&["bench", &model, &tasks], "bad.toml, line 2, column 6: this is not TOML; expected `[[task]]`"),
        (&["What is gravity?"], "to ask a model, write: pellucid run \"What is gravity?\""),
        (&["rum", "hi"], "a similar subcommand exists: 'run'"),
        (&["--model", "tiny", "hi"], "--model belongs after a command, as in: pellucid run --model MODEL"),
        (&["-m", "tiny", "hi"], "-m belongs after a command"),
        (&["pull", "-m", "tiny"], "unexpected argument '-m'"),
        (&["run", "hi", "-m", &model, "--tools", no_toml], "line 1, column 1: this is not JSON: expected a value"),
        (&["run", "hi", "-m", &model, "--json-schema", no_toml], "this is not JSON: expected a value"),
        (&["run", "-m", no_toml, "hi"], "bad.toml: not a model: expected a GGUF file or a Hugging Face folder"),
        (&["run", "-m", folder, "hi"], "config.json: missing; a Hugging Face folder has a config.json"),
        (&["run", no_toml, "hi"], "bad.toml` is not a model; --file "),
        (&["run", no_toml], "bad.toml` is not a model; --file "),
        (&["run", folder], "no-model` has no config.json, so it is no model"),
        (&["serve", "tiny"], "\"tiny\" needs a flag before it; models are given as in: pellucid serve --model tiny"),
        (&["pull", "qwen2.5-coder-15b"], "there is no model `qwen2.5-coder-15b`; did you mean qwen2.5-coder-1.5b?"),
        (&["run", "qwen25-coder", "hi"], "did you mean qwen2.5-coder-1.5b?"),
        // Of the default's family, but near the name of another size; the beginning of names.
        (&["run", "qwen15", "hi"], "did you mean qwen2.5-coder-1.5b?"),
        (&["run", "qwen2.5", "hi"], "did you mean qwen2.5-coder-1.5b?"),
        (&["run", "llama"], "did you mean llama3.2-3b? If the word is the prompt"),
        (&["rnu", "hi"], "there is no command \"rnu\": did you mean pellucid run?"),
        (&["models", "rm", "mine"], "`pellucid rm MODEL` removes a model"),
        (&["run", "smolm2"], "did you mean smollm2? If the word is the prompt, name a model with --model"),
        (&["inspect", no_toml], "bad.toml: not a model: expected"),
        (&["serve", "-m", no_toml, "--port", "0"], "bad.toml: not a model: expected"),
        (
            &["quantize", "tiny", "no-folder/q.gguf", "--type", "q8_0"],
            "there is no folder no-folder for no-folder/q.gguf",
        ),
        (&["models", "add", "x", "none.gguf"], "there is no file or folder none.gguf"),
    ];
    for (args, expected) in cases {
        let ran = home.run(args);
        assert_eq!(ran.status, Some(2), "{args:?}: {ran:?}");
        assert!(ran.stdout.is_empty() && ran.stderr.contains(expected), "{args:?}: {ran:?}");
        for words in LIBRARY_WORDS {
            assert!(!ran.stderr.contains(words), "{words:?}: {args:?}: {ran:?}");
        }
    }
}

/// A file that is no text, under every flag and argument that takes a text.
#[test]
fn files_that_are_no_text_are_wrong_usage() {
    let home = Home::new();
    let model = tiny_model(&home, Some(TEMPLATE));
    let binary = home.path().join("binary");
    std::fs::write(&binary, b"\x89PNG\r\n\x1a\n\0\0").unwrap();
    let binary = binary.to_str().unwrap();
    let with_template = home.path().join("settings.toml");
    std::fs::write(&with_template, "[tiny]\nchat-template = \"binary\"\n").unwrap();
    let run = ["run", "-m", &model, "hi"];
    let serve = ["serve", "-m", &model, "--port", "0"];
    let models = ["serve", "-m", &model, "-m", "tiny", "--port", "0"];
    let cases: [(&[&str], &str, &str); 15] = [
        (&run, "--file", binary),
        (&run, "--grammar", binary),
        (&run, "--json-schema", binary),
        (&run, "--tools", binary),
        (&run, "--guard-patterns", binary),
        (&run, "--chat-template", binary),
        (&["explain", "-m", &model, "hi"], "--file", binary),
        (&serve, "--keys-file", binary),
        (&serve, "--shared-system", binary),
        (&serve, "--chat-template", binary),
        (&serve, "--config", binary),
        (&models, "--model-settings", with_template.to_str().unwrap()),
        (&["bench", &model], "--questions", binary),
        (&["bench", &model], "--tasks", binary),
        (&["perplexity", &model], "--window=4", binary),
    ];
    for (args, flag, file) in cases {
        // The values of the benchmarks' flags are optional, so they belong to the same word.
        let joined = format!("{flag}={file}");
        let words = if args[0] == "bench" { vec![joined.as_str()] } else { vec![flag, file] };
        let ran = home.run(&[args, &words].concat());
        assert_eq!(ran.status, Some(2), "{flag}: {ran:?}");
        let message = ran.usage();
        assert!(message.contains("binary") && message.contains("not UTF-8"), "{flag}: {ran:?}");
        assert!(message.contains("0x89 at offset 0") || message.contains("byte 0"), "{flag}: {ran:?}");
        for words in LIBRARY_WORDS {
            assert!(!ran.stderr.contains(words), "{words:?}: {flag}: {ran:?}");
        }
    }
    for args in [&["tokenize", &model][..], &["run", "-m", &model], &["perplexity", &model, "-"]] {
        let ran = home.run_with_input(args, b"\x89PNG");
        assert!(ran.usage().contains("standard input is not UTF-8: the byte 0x89 at offset 0"), "{args:?}: {ran:?}");
    }
}

/// Prompts and flags that only the loaded model can refuse.
#[test]
fn what_does_not_fit_the_model_is_wrong_usage() {
    let home = Home::new();
    let model = tiny_model(&home, Some(TEMPLATE));
    let long = "word ".repeat(400);
    let cases: [(&[&str], &str); 7] = [
        (&["run", "-m", &model, &long], "but the context holds"),
        (&["explain", "-m", &model, &long], "but the context holds"),
        (&["run", "-m", &model, "hi", "--kv-memory", "1kB"], "--kv-memory gives"),
        (&["explain", "-m", &model, "hi", "--attention", "99"], "--attention: expected a layer from"),
        (&["explain", "-m", &model, "hi", "-n", "2", "--layers", "--token", "9"], "--token: expected 1 to 2, found 9"),
        (&["inspect", &model, "--context", "18446744073709551615", "--batch", "2"], "more than 2^64 bytes"),
        (&["pull", "o/r", "--endpoint", "no url"], "the endpoint `no url` is not a URL"),
    ];
    for (args, expected) in cases {
        let ran = home.run(args);
        assert!(ran.usage().contains(expected), "{args:?}: {ran:?}");
        for words in LIBRARY_WORDS {
            assert!(!ran.stderr.contains(words), "{words:?}: {args:?}: {ran:?}");
        }
    }
}

#[test]
fn failures_exit_with_1_without_codes_of_the_operating_system() {
    let home = Home::new();
    let damaged = home.path().join("damaged.gguf");
    std::fs::write(&damaged, "GGUF").unwrap();
    let ran = home.run(&["run", damaged.to_str().unwrap(), "hi"]);
    assert!(ran.error().contains("damaged.gguf"), "{ran:?}");
    let ran = home.run(&["run", "owner/repo", "hi"]);
    assert!(ran.error().contains("there is no file or folder `owner/repo`, and it could not be pulled"), "{ran:?}");
    assert!(!ran.stderr.contains("os error"), "{ran:?}");
}

#[test]
fn the_first_word_is_the_model_if_it_names_one() {
    let home = Home::new();
    let model = tiny_model(&home, Some(TEMPLATE));
    let run = |args: &[&str]| home.run(&[&["run"], args, &["-n", "6"]].concat());
    let expected = run(&["-m", &model, "Hello there"]).ok().to_owned();
    assert_eq!(run(&[&model, "Hello there"]).ok(), expected);
    assert_eq!(run(&[&model, "Hello", "there"]).ok(), expected, "words are joined");
    assert_eq!(run(&["-m", &model, "Hello", "there"]).ok(), expected);
    let piped = home.run_with_input(&["run", &model, "-n", "6"], b"Hello there");
    assert_eq!(piped.ok(), expected);

    home.run(&["models", "add", "Mine", &model]).ok();
    assert_eq!(run(&["mine", "Hello there"]).ok(), expected);
    let listed = home.run(&["models"]);
    assert!(listed.ok().contains("Mine") && listed.ok().contains("smollm2"), "{listed:?}");
    assert!(home.run(&["list"]).ok().starts_with("Mine\n  a name of  "));
    assert!(run(&["mime", "Hello there"]).usage().contains("did you mean Mine?"));
    assert!(run(&["mime"]).usage().contains("did you mean Mine?"), "a word alone could be a prompt");
    assert!(run(&["smolm2", "Hello"]).usage().contains("did you mean smollm2?"));
    assert!(run(&["What", "is", "gravity?"]).usage().contains("put a prompt in quotes"));
    assert!(home.run(&["models", "add", "smollm2", &model]).usage().contains("a known model"));
    assert!(home.run(&["rm", "mine"]).ok().contains("stays"));
    assert!(std::path::Path::new(&model).exists());

    // The word names no model, so it is a prompt for the default model, which cannot be fetched here.
    std::fs::create_dir(home.path().join("notes")).unwrap();
    let in_folder = home.command(&["run", "notes", "hi"]).current_dir(home.path()).output().unwrap();
    assert!(Ran::from(in_folder).usage().contains("the folder `notes` has no config.json"));

    let asked = run(&["gravity"]);
    assert!(asked.error().contains("could not be fetched") || asked.stderr.contains("hub"), "{asked:?}");
}

#[test]
fn standard_input_and_files_join_the_prompt() {
    let home = Home::new();
    let model = tiny_model(&home, Some(TEMPLATE));
    let notes = home.path().join("notes.txt");
    std::fs::write(&notes, "from a file").unwrap();
    let notes = notes.to_str().unwrap();
    let args = ["run", "-m", &model, "Sum up", "-n", "4"];
    let whole = format!("Sum up\n\nFile {notes}:\n```\nfrom a file\n```\n\nStandard input:\n```\npiped\n```\n");
    let expected = home.run(&["run", "-m", &model, &whole, "-n", "4", "--json"]).ok().to_owned();
    let joined = home.run_with_input(&[&args[..], &["--file", notes, "--json"]].concat(), b"piped\n").ok().to_owned();
    let object = |text: &str| -> serde_json::Value { serde_json::from_str(text).unwrap() };
    let (expected, joined) = (object(&expected), object(&joined));
    assert_eq!(joined["text"], expected["text"]);
    assert_eq!(joined["tokens"]["prompt"], expected["tokens"]["prompt"]);
    let alone = home.run_with_input(&[&args[..], &["--json"]].concat(), b" \n").ok().to_owned();
    assert!(object(&alone)["tokens"]["prompt"].as_u64() < joined["tokens"]["prompt"].as_u64(), "nothing to add");

    let ran = home.run_with_input(&args, b"ab\xffcd");
    let expected = "standard input is not UTF-8: the byte 0xff at offset 2 begins no character; expected a text";
    assert!(ran.usage().contains(expected), "{ran:?}");
    let binary = home.path().join("binary");
    std::fs::write(&binary, b"a\xc3").unwrap();
    let binary = binary.to_str().unwrap();
    let ran = home.run(&[&args[..], &["--file", binary]].concat());
    let expected = format!("--file: {binary} is not UTF-8: the byte 0xc3 at offset 1 begins no character; expected");
    assert!(ran.usage().contains(&expected), "{ran:?}");
}

#[test]
fn json_is_one_object_with_everything() {
    let home = Home::new();
    let model = tiny_model(&home, Some(TEMPLATE));
    let run = |more: &[&str]| home.run(&[&["run", "Hello", "-m", &model, "-n", "5"], more].concat());
    let plain = run(&["--temperature", "1.2", "--seed", "9"]);
    let ran = run(&["--temperature", "1.2", "--seed", "9", "--json"]);
    let object: serde_json::Value = serde_json::from_str(ran.ok()).unwrap();
    assert_eq!(object["text"].as_str().unwrap(), plain.ok().strip_suffix('\n').unwrap());
    assert_eq!((object["seed"].as_u64(), object["finish_reason"].as_str()), (Some(9), Some("max_tokens")));
    assert_eq!(object["tokens"]["output"], 5);
    assert_eq!(object["settings"]["temperature"], 1.2);
    assert!(object["seconds"]["total"].as_f64().unwrap() >= object["seconds"]["prefill"].as_f64().unwrap());
    let several = run(&["--choices", "2", "--json"]);
    let object: serde_json::Value = serde_json::from_str(several.ok()).unwrap();
    assert_eq!(object["replies"].as_array().unwrap().len(), 2);
    let refused = run(&["--json", "--stop", ""]);
    assert!(refused.usage().contains("--stop"), "errors are text on standard error: {refused:?}");
}

/// Starts the program and waits until a line of its log contains `words`; returns the rest of the log too.
fn started(mut command: Command, words: &str) -> (Child, mpsc::Receiver<String>) {
    let mut child = command.spawn().unwrap();
    let stderr = BufReader::new(child.stderr.take().unwrap());
    let (sender, lines) = mpsc::channel();
    std::thread::spawn(move || stderr.lines().map_while(Result::ok).for_each(|line| drop(sender.send(line))));
    loop {
        match lines.recv_timeout(Duration::from_secs(120)) {
            Ok(line) if line.contains(words) => return (child, lines),
            Ok(_) => {}
            Err(_) => {
                child.kill().unwrap();
                child.wait().unwrap();
                panic!("it never said {words:?}");
            }
        }
    }
}

fn signal(child: &Child, signal: &str) {
    assert!(Command::new("kill").args([signal, &child.id().to_string()]).status().unwrap().success());
}

#[test]
fn a_signal_has_its_own_exit_status_in_every_command() {
    let home = Home::new();
    let model = tiny_model(&home, Some(TEMPLATE));
    // The system accepts connections to it, and nobody answers.
    let silent = TcpListener::bind("127.0.0.1:0").unwrap();
    let silent_url = format!("http://{}", silent.local_addr().unwrap());
    for (name, status) in [("-INT", 130), ("-TERM", 143)] {
        let mut waiting = home.command(&["run", "-m", &model, "hi"]);
        waiting.stdin(Stdio::piped());
        let pulling = home.command(&["pull", "smollm2", "--endpoint", &silent_url]);
        let serving = home.command(&["serve", "-m", &model, "--port", "0", "--device", "cpu"]);
        for (command, words) in
            [(waiting, "waiting for the end of standard input"), (pulling, "to download once"), (serving, "listening")]
        {
            let (mut child, log) = started(command, words);
            // Waiting for the child would close its standard input.
            let _input = child.stdin.take();
            signal(&child, name);
            let code = child.wait().unwrap().code();
            assert_eq!(code, Some(status), "{name} {words}: {:?}", log.iter().collect::<Vec<_>>());
            let mut text = String::new();
            child.stdout.take().unwrap().read_to_string(&mut text).unwrap();
            assert_eq!(text, "", "{name} {words}");
        }
    }
}

#[test]
fn the_first_signal_to_a_server_says_how_to_stop_at_once() {
    let home = Home::new();
    let model = tiny_model(&home, Some(TEMPLATE));
    let (mut child, log) = started(home.command(&["serve", "-m", &model, "--port", "0"]), "listening");
    signal(&child, "-INT");
    assert_eq!(child.wait().unwrap().code(), Some(130));
    let log: Vec<String> = log.iter().collect();
    assert!(log.iter().any(|line| line.contains("draining") && line.contains("press Ctrl-C again")), "{log:?}");
}

#[test]
fn every_command_has_help_within_80_columns() {
    let home = Home::new();
    let help = home.run(&["--help"]).ok().to_owned();
    let commands: Vec<String> = (help.lines().skip_while(|line| *line != "Commands:").skip(1))
        .map_while(|line| line.strip_prefix("  ")?.split(' ').next().map(str::to_owned))
        .filter(|name| !name.is_empty())
        .collect();
    assert!(commands.len() > 12 && commands.contains(&"models".to_owned()), "{commands:?}");
    for command in commands {
        let ran: Ran = home.run(&["help", &command]);
        let long: Vec<&str> = ran.ok().lines().filter(|line| line.chars().count() > 80).collect();
        assert!(long.is_empty(), "{command}: {long:?}");
    }
}

#[test]
fn completions_and_manual_pages_name_every_command() {
    let home = Home::new();
    for shell in ["bash", "zsh", "fish", "elvish", "powershell"] {
        let script = home.run(&["completions", shell]).ok().to_owned();
        assert!(["explain", "models", "kv-memory"].iter().all(|word| script.contains(word)), "{shell}");
    }
    assert!(home.run(&["completions", "tcsh"]).usage().contains("bash"));
    let folder = home.path().join("man");
    let written = home.run(&["man", "--out", folder.to_str().unwrap()]).ok().to_owned();
    assert!(written.lines().count() > 14, "{written}");
    let page = std::fs::read_to_string(folder.join("pellucid-run.1")).unwrap();
    assert!(page.contains("Answer a prompt") && page.contains("json"), "{page}");
    assert!(!folder.join("pellucid-man.1").exists(), "the command for packagers is hidden");
}
