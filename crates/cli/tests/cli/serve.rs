//! `pellucid serve` through the built program: start-up, settings in layers, signals, and the messages of refusals.

use std::io::{BufRead, BufReader, Read, Write};
use std::net::TcpStream;
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use crate::support::Home;
use crate::support::tiny_model::{TEMPLATE, tiny_model};

/// A server in a process of its own.
pub(crate) struct Served {
    child: Child,
    pub(crate) address: String,
    log: BufReader<std::process::ChildStderr>,
    pub(crate) start_up: String,
}

impl Served {
    /// Starts on a free port and waits until it listens.
    pub(crate) fn start(home: &Home, arguments: &[&str], environment: &[(&str, &str)]) -> Served {
        let mut command = home.command(&[&["serve", "--port", "0"], arguments].concat());
        command.envs(environment.iter().copied());
        Served::spawn(command)
    }

    fn spawn(mut command: Command) -> Served {
        let mut child = command.stdout(Stdio::null()).spawn().unwrap();
        let mut log = BufReader::new(child.stderr.take().unwrap());
        let mut start_up = String::new();
        let address = loop {
            let mut line = String::new();
            assert!(log.read_line(&mut line).unwrap() > 0, "it ended: {start_up}");
            start_up += &line;
            if let Some((_, rest)) = line.split_once("://") {
                break rest.split(['"', ' ']).next().unwrap().to_owned();
            }
        };
        Served { child, address, log, start_up }
    }

    fn get(&self, path: &str, headers: &str) -> String {
        let mut stream = TcpStream::connect(&self.address).unwrap();
        stream.set_read_timeout(Some(Duration::from_secs(30))).unwrap();
        write!(stream, "GET {path} HTTP/1.1\r\nHost: {}\r\nConnection: close\r\n{headers}\r\n", self.address).unwrap();
        let mut reply = String::new();
        stream.read_to_string(&mut reply).unwrap();
        reply
    }

    pub(crate) fn terminate(&self) {
        self.signal("-TERM");
    }

    fn signal(&self, name: &str) {
        assert!(Command::new("kill").args([name, &self.child.id().to_string()]).status().unwrap().success());
    }

    /// Returns the next line of the log that contains `words`.
    pub(crate) fn next_line(&mut self, words: &str) -> String {
        loop {
            let mut line = String::new();
            assert!(self.log.read_line(&mut line).unwrap() > 0, "it ended without {words:?}");
            if line.contains(words) {
                return line;
            }
        }
    }

    /// Waits for the end: status and the rest of the log.
    pub(crate) fn ended(mut self) -> (Option<i32>, String) {
        let status = self.child.wait().unwrap().code();
        let mut log = String::new();
        self.log.read_to_string(&mut log).unwrap();
        (status, log)
    }
}

impl Drop for Served {
    /// A test that fails must not leave its server running.
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// The sampling flags are defaults of requests, in every layer of the settings, over what the model recommends.
#[test]
fn sampling_flags_are_defaults_of_requests() {
    let home = Home::new();
    let model = tiny_model(&home, Some(TEMPLATE));
    let file = std::path::Path::new(&model).join("generation_config.json");
    std::fs::write(&file, r#"{"temperature": 0.6, "top_k": 20}"#).unwrap();
    let flags = ["--model", &model, "--device", "cpu", "--top-p", "0.9", "--dry-multiplier", "0.8"];
    let served = Served::start(&home, &flags, &[("PELLUCID_MIN_P", "0.05")]);
    let line = "sampling defaults: temperature 0.6 (model), top_k 20 (model), top_p 0.9 (server), min_p 0.05 (server), \
                dry_multiplier 0.8 (server)";
    assert!(served.start_up.contains(line), "{}", served.start_up);
    let models = served.get("/v1/models", "");
    for part in [
        r#""temperature":{"value":0.6,"source":"model"}"#,
        r#""top_p":{"value":0.9,"source":"server"}"#,
        r#""min_p":{"value":0.05,"source":"server"}"#,
    ] {
        assert!(models.contains(part), "{part}: {models}");
    }
    served.terminate();
    served.ended();

    // A preset replaces the recommendation.
    let served = Served::start(&home, &["--model", &model, "--device", "cpu", "--preset", "creative"], &[]);
    let line = "sampling defaults: temperature 1 (server), min_p 0.05 (server), presence_penalty 0.3 (server)";
    assert!(served.start_up.contains(line), "{}", served.start_up);
    served.terminate();
    served.ended();
    let refused = home.run(&["serve", "--model", &model, "--top-p", "1.5"]);
    assert!(refused.stderr.contains("--top-p: expected 0 to 1, found 1.5"), "{refused:?}");
}

/// `open` starts the program that opens addresses, and says where the page is if there is none.
#[test]
fn open_serves_and_opens_the_page() {
    use std::os::unix::fs::PermissionsExt;
    let home = Home::new();
    let model = tiny_model(&home, Some(TEMPLATE));
    let mut served = Served::spawn(home.command(&["open", "--port", "0", &model]));
    let line = served.next_line("no browser could be opened");
    assert!(line.contains(&format!("the page is at http://{}/", served.address)), "{line}");
    served.terminate();
    served.ended();

    let opener = home.path().join(if cfg!(target_os = "macos") { "open" } else { "xdg-open" });
    std::fs::write(&opener, "#!/bin/sh\necho \"$1\" >> \"$PELLUCID_HOME/opened\"\n").unwrap();
    std::fs::set_permissions(&opener, std::fs::Permissions::from_mode(0o755)).unwrap();
    let served = Served::start(&home, &["--model", &model, "--open"], &[]);
    let opened = home.path().join("opened");
    let address = (0..500).find_map(|_| {
        std::thread::sleep(Duration::from_millis(20));
        std::fs::read_to_string(&opened).ok().filter(|text| text.ends_with('\n'))
    });
    assert_eq!(address.unwrap().trim(), format!("http://{}/", served.address));
    served.terminate();
    served.ended();
}

#[test]
fn it_says_what_it_does_serves_and_leaves() {
    let home = Home::new();
    let model = tiny_model(&home, Some(TEMPLATE));
    let served =
        Served::start(&home, &["--model", &model, "--device", "cpu"], &[("PELLUCID_API_KEY", "a-long-secret")]);
    for word in [
        "model=\"model\"",
        "device=\"cpu",
        "memory: weights",
        ", scratch ",
        " in use now, ",
        "keys=true",
        "http://127.0.0.1:",
    ] {
        assert!(served.start_up.contains(word), "{word} in {}", served.start_up);
    }
    assert!(served.get("/health", "").starts_with("HTTP/1.1 200"));
    assert!(served.get("/v1/models", "").starts_with("HTTP/1.1 401"));
    assert!(served.get("/v1/models", "X-Api-Key: a-long-secret\r\n").contains("\"id\":\"model\""));
    served.terminate();
    let (status, log) = served.ended();
    assert_eq!(status, Some(143), "{log}");
    assert!(log.contains("try: curl http://127.0.0.1:") && log.contains("Bearer $KEY"), "{log}");
    assert!(log.contains("every reply was finished"), "{log}");
    assert!(!log.contains("a-long-secret"), "no key in the log");
}

#[test]
fn keys_are_reloaded_at_a_signal_and_on_change() {
    let home = Home::new();
    let model = tiny_model(&home, None);
    let path = home.path().join("keys.toml");
    let write = |text: &str| {
        // Renamed into place, as careful tools do; the server must follow to the new file.
        std::fs::write(home.path().join("keys.new"), text).unwrap();
        std::fs::rename(home.path().join("keys.new"), &path).unwrap();
    };
    let tenant = |name: &str, more: &str| format!("[[tenant]]\nname = \"{name}\"\nkeys = [\"key-of-{name}\"]\n{more}");
    write(&tenant("a", ""));
    let keys_file = path.to_str().unwrap();
    let mut served = Served::start(&home, &["--model", &model, "--device", "cpu", "--keys-file", keys_file], &[]);
    let status = |served: &Served, name: &str| {
        let reply = served.get("/v1/models", &format!("X-Api-Key: key-of-{name}\r\n"));
        reply.split(' ').nth(1).unwrap().to_owned()
    };
    assert_eq!((status(&served, "a").as_str(), status(&served, "b").as_str()), ("200", "401"));
    write(&tenant("b", "kv_tokens = 64"));
    served.signal("-HUP");
    let warning = served.next_line("kv_tokens");
    assert!(warning.contains("WARN") && warning.contains("\"b\""), "{warning}");
    served.next_line("reloaded");
    assert_eq!((status(&served, "a").as_str(), status(&served, "b").as_str()), ("401", "200"));
    // Without a signal.
    write(&(tenant("b", "") + &tenant("c", "")));
    served.next_line("reloaded");
    assert_eq!((status(&served, "b").as_str(), status(&served, "c").as_str()), ("200", "200"));
    // A file that is refused changes nothing; the log names it and the reason.
    write(&tenant("a", "kv_tokens = \"many\""));
    served.signal("-HUP");
    let error = served.next_line("not reloaded");
    assert!(
        error.contains("ERROR") && error.contains("keys.toml") && error.contains("expected a whole number"),
        "{error}"
    );
    assert_eq!((status(&served, "a").as_str(), status(&served, "c").as_str()), ("401", "200"));
    std::fs::remove_file(&path).unwrap();
    served.signal("-HUP");
    served.next_line("not reloaded");
    assert_eq!(status(&served, "c"), "200");
    served.terminate();
    assert_eq!(served.ended().0, Some(143));
    // Without a file to reload, SIGHUP shuts down, as when a terminal is closed.
    let served = Served::start(&home, &["--model", &model, "--device", "cpu"], &[]);
    served.signal("-HUP");
    assert_eq!(served.ended().0, Some(129));
}

#[test]
fn a_certificate_is_reloaded_at_a_signal() {
    const FIRST: &[u8] = include_bytes!("../../../server/tests/certificates/first.pem");
    const SECOND: &[u8] = include_bytes!("../../../server/tests/certificates/second.pem");
    let home = Home::new();
    let model = tiny_model(&home, None);
    let [certificate, key] = ["certificate.pem", "key.pem"].map(|name| home.path().join(name));
    let write = |chain: &[u8], private: &[u8]| {
        std::fs::write(&certificate, chain).unwrap();
        std::fs::write(&key, private).unwrap();
    };
    write(FIRST, FIRST);
    let files = [&certificate, &key].map(|path| path.to_str().unwrap().to_owned());
    let flags = ["--model", &model, "--device", "cpu", "--tls-cert", &files[0], "--tls-key", &files[1]];
    let mut served = Served::start(&home, &flags, &[]);
    write(SECOND, SECOND);
    served.signal("-HUP");
    let line = served.next_line("reloaded");
    assert!(line.contains("INFO") && line.contains("certificate.pem"), "{line}");
    // A pair that does not fit.
    write(SECOND, FIRST);
    served.signal("-HUP");
    let line = served.next_line("not reloaded");
    assert!(line.contains("ERROR") && line.contains("key.pem") && line.contains("cannot be used"), "{line}");
    served.terminate();
    assert_eq!(served.ended().0, Some(143));
}

/// Connections beyond the limit of open files must not keep health checks waiting.
#[test]
fn health_is_answered_at_the_limit_of_open_files() {
    let home = Home::new();
    let model = tiny_model(&home, None);
    let own = home.command(&[]);
    let mut limited = Command::new("/bin/sh");
    limited.args(["-c", "ulimit -n 96 && exec \"$0\" \"$@\""]).arg(own.get_program());
    limited.args(["serve", "--port", "0", "--device", "cpu", "--header-timeout", "3600", "--model", &model]);
    limited.envs(own.get_envs().filter_map(|(name, value)| Some((name, value?)))).stderr(Stdio::piped());
    let mut served = Served::spawn(limited);
    let warning = served.next_line("--max-connections does not fit");
    assert!(warning.contains("16384") && warning.contains("open_files=96"), "{warning}");
    // Twice the limit, all silent. Before, the first 96 were accepted and everything else waited.
    let silent: Vec<TcpStream> = (0..200).map(|_| TcpStream::connect(&served.address).unwrap()).collect();
    for _ in 0..3 {
        assert!(served.get("/health", "").starts_with("HTTP/1.1 200"));
        assert!(served.get("/v1/models", "").starts_with("HTTP/1.1 200"));
    }
    drop(silent);
    served.terminate();
    let (status, log) = served.ended();
    assert_eq!(status, Some(143));
    assert!(!log.contains("could not be accepted"), "{log}");
}

#[test]
fn the_log_names_the_address_of_the_client() {
    let home = Home::new();
    let model = tiny_model(&home, None);
    let forwarded = "X-Forwarded-For: 198.51.100.9, 203.0.113.5\r\n";
    let client = |flags: &[&str]| {
        let mut served = Served::start(&home, &[&["--model", &model, "--device", "cpu"], flags].concat(), &[]);
        served.get("/health", forwarded);
        let line = served.next_line("request_id");
        served.terminate();
        served.ended();
        line.split("client=").nth(1).unwrap().split(' ').next().unwrap().to_owned()
    };
    assert_eq!(client(&[]), "127.0.0.1", "anyone can write the header");
    assert_eq!(client(&["--trusted-proxy", "127.0.0.0/8"]), "203.0.113.5");
    assert_eq!(client(&["--trusted-proxy", "127.0.0.1", "--trusted-proxy", "203.0.113.0/24"]), "198.51.100.9");
    let ran = home.run(&["serve", "--model", &model, "--trusted-proxy", "10.0.0.0/33"]);
    assert!(ran.status == Some(2) && ran.stderr.contains("expected an address or a range"), "{ran:?}");
}

#[test]
fn flags_win_over_the_environment_and_that_over_the_file() {
    let home = Home::new();
    let model = tiny_model(&home, None);
    let config = home.path().join("serve.toml");
    std::fs::write(&config, format!("model = {model:?}\nserved_model_name = \"file\"\nlog-format = \"json\"\n"))
        .unwrap();
    let config = config.to_str().unwrap();
    let name = |arguments: &[&str], environment: &[(&str, &str)]| {
        let served = Served::start(&home, &[&["--device", "cpu"], arguments].concat(), environment);
        assert!(served.start_up.starts_with('{'), "the file's log format: {}", served.start_up);
        let reply = served.get("/v1/models", "");
        served.terminate();
        served.ended();
        let (_, rest) = reply.split_once("\"id\":\"").unwrap();
        rest.split('"').next().unwrap().to_owned()
    };
    let environment = [("PELLUCID_SERVED_MODEL_NAME", "environment")];
    assert_eq!(name(&["--config", config], &[]), "file");
    assert_eq!(name(&["--config", config], &environment), "environment");
    assert_eq!(name(&["--config", config, "--served-model-name", "flag"], &environment), "flag");
}

#[test]
fn drafters_are_settings_like_others() {
    let home = Home::new();
    let model = tiny_model(&home, Some(TEMPLATE));
    let config = home.path().join("pellucid.toml");
    std::fs::write(&config, "speculate = [\"ngram\", \"suffix\"]\ndraft_tokens = 4\n").unwrap();
    let config = config.to_str().unwrap();
    let start = |arguments: &[&str], environment: &[(&str, &str)]| {
        let served = Served::start(&home, &[&["--model", &model, "--device", "cpu"], arguments].concat(), environment);
        served.terminate();
        let start_up = served.start_up.clone();
        served.ended();
        start_up
    };
    let fingerprint = |log: &str| {
        let (_, rest) = log.split_once("fingerprint").expect("the log has it");
        rest.split_whitespace().next().unwrap().to_owned()
    };
    let off = start(&[], &[]);
    assert!(!off.contains("speculation:"), "{off}");
    let from_file = start(&["--config", config], &[]);
    assert!(from_file.contains("speculation: ngram,suffix"), "{from_file}");
    let draft = format!("draft={model},ngram");
    let from_environment = start(&["--config", config], &[("PELLUCID_SPECULATE", &draft)]);
    assert!(from_environment.contains("speculation: draft=model,ngram"), "{from_environment}");
    assert!(from_environment.contains("; draft model: weights "), "{from_environment}");
    let flag = start(&["--config", config, "--speculate", "off"], &[("PELLUCID_SPECULATE", &draft)]);
    assert!(!flag.contains("speculation:"), "{flag}");
    // Replies are the same, so drafters are no part of the fingerprint.
    assert_eq!(fingerprint(&off), fingerprint(&from_environment));
    let wrong = home.run(&["serve", "--model", &model, "--speculate", "ngram,of"]);
    assert!(wrong.usage().contains("expected draft=MODEL, mtp, ngram or suffix"), "{}", wrong.stderr);
}

#[test]
fn what_is_wrong_is_a_sentence() {
    let home = Home::new();
    let model = tiny_model(&home, None);
    let write = |name: &str, text: &str| {
        let path = home.path().join(name);
        std::fs::write(&path, text).unwrap();
        path.to_str().unwrap().to_owned()
    };
    let taken = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let port = taken.local_addr().unwrap().port().to_string();
    let (keys, config, pem) =
        (write("keys.toml", "[[tenant]]"), write("serve.toml", "prot = 1"), write("a.pem", "nothing"));
    let broken = write("broken.gguf", "GGUF");
    let wrong_port = write("serve2.toml", "port = \"abc\"");
    let ran = home.run(&["serve", "--model", &model, "--host", "example.com"]);
    assert!(ran.status == Some(2) && ran.stderr.contains("expected an IP address"), "{ran:?}");
    let refused: [(&[&str], &str); 9] = [
        (&["--model", &model, "--port", &port], "cannot listen at 127.0.0.1 port"),
        (&["--model", &model, "--host", "localhost", "--port", &port], "cannot listen at 127.0.0.1 port"),
        (&["--model", &model, "--host", "0.0.0.0"], "--allow-unauthenticated-network"),
        (&["--model", &model, "--keys-file", &keys], "name"),
        (&["--model", &model, "--keys-file", "/no/such/file"], "--keys-file: there is no file /no/such/file"),
        (&["--model", &model, "--config", &config], "there is no setting \"prot\""),
        (&["--model", &model, "--tls-cert", &pem, "--tls-key", &pem], "no certificate"),
        (&["--model", &broken, "--port", "0"], "broken.gguf"),
        (&["--model", &model, "--port", "0", "--api-key", "short"], "8 to 512"),
    ];
    for (arguments, words) in refused {
        let ran = home.run(&[&["serve"], arguments].concat());
        let is_failure = words.starts_with("cannot listen") || words == "broken.gguf";
        let message = if is_failure { ran.error() } else { ran.usage() };
        assert!(message.contains(words), "{arguments:?}: {message}");
        assert_eq!(message.lines().count(), 1, "{message}");
    }
    let ran = home.run(&["serve", "--model", &model, "--config", &wrong_port]);
    assert!(ran.status == Some(2) && ran.stderr.contains("serve2.toml: port: invalid value 'abc'"), "{ran:?}");
    for origin in ["example.com", "https://example.com/", "https://example.com/path", "https://"] {
        let ran = home.run(&["serve", "--model", &model, "--cors-origin", origin]);
        assert!(ran.status == Some(2) && ran.stderr.contains("expected * or an origin"), "{ran:?}");
    }
}

#[test]
fn a_variable_that_is_wrong_is_named() {
    use std::os::unix::ffi::OsStrExt;
    let home = Home::new();
    let no_text = std::ffi::OsStr::from_bytes(b"secret-\xff\xfe");
    let cases = [
        (
            "PELLUCID_PORT",
            std::ffi::OsStr::new("tcp://10.0.0.1:80"),
            "PELLUCID_PORT: invalid value 'tcp://10.0.0.1:80'",
        ),
        ("PELLUCID_FAST", std::ffi::OsStr::new("maybe"), "PELLUCID_FAST: expected true or false"),
        ("PELLUCID_API_KEY", no_text, "PELLUCID_API_KEY is set to bytes that are not UTF-8"),
        ("PELLUCID_STALL_TIMEOUT", std::ffi::OsStr::new("0"), "PELLUCID_STALL_TIMEOUT: invalid value '0'"),
    ];
    for (name, value, words) in cases {
        let command = home.command(&["serve", "--model", "/no/such/model"]).env(name, value).output().unwrap();
        let ran = crate::support::Ran::from(command);
        assert!(ran.status != Some(0) && ran.stderr.contains(words), "{name}: {ran:?}");
    }
    let ran = home.command(&["serve", "--model", "/no/such/model"]).env("PELLUCID_PROT", "1").output().unwrap();
    let ran = crate::support::Ran::from(ran);
    assert!(ran.stderr.contains("note: PELLUCID_PROT is set, but there is no setting of that name"), "{ran:?}");
}

/// Address space that the server has besides that in use when clients announce bodies.
#[cfg(target_os = "linux")]
const SPARE_BYTES: u64 = 400 << 20;

#[cfg(target_os = "linux")]
#[test]
fn announced_bodies_take_no_address_space() {
    let home = Home::new();
    let model = tiny_model(&home, None);
    let served = Served::start(&home, &["--model", &model, "--threads", "1"], &[]);
    let status = std::fs::read_to_string(format!("/proc/{}/status", served.child.id())).unwrap();
    let size = status.lines().find_map(|line| line.strip_prefix("VmSize:")).unwrap();
    let size = size.trim().trim_end_matches(" kB").parse::<u64>().unwrap() * 1024;
    let limit = format!("--as={}", size + SPARE_BYTES);
    let limited = Command::new("prlimit").args([&limit, "--pid", &served.child.id().to_string()]).status();
    assert!(limited.unwrap().success());
    // Twice the address space that is left, if the announced length were allocated.
    let announce = |_| {
        let mut stream = TcpStream::connect(&served.address).unwrap();
        let length = 4 << 20;
        write!(
            stream,
            "POST /v1/completions HTTP/1.1\r\nHost: {}\r\nContent-Type: application/json\r\n\
             Content-Length: {length}\r\n\r\n{{",
            served.address
        )
        .unwrap();
        stream
    };
    let clients: Vec<TcpStream> = (0..200).map(announce).collect();
    for _ in 0..3000 {
        let metrics = served.get("/metrics", "");
        let line = metrics.lines().find(|line| line.starts_with("pellucid_client_memory_bytes ")).unwrap().to_owned();
        // The first bytes of all bodies have arrived.
        if line.rsplit(' ').next().unwrap().parse::<f64>().unwrap() >= 200.0 * 65536.0 {
            drop(clients);
            assert!(served.get("/health", "").starts_with("HTTP/1.1 200"));
            served.terminate();
            assert_eq!(served.ended().0, Some(143));
            return;
        }
        std::thread::sleep(Duration::from_millis(10));
    }
    panic!("the bodies did not arrive");
}
