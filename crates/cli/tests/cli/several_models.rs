//! `pellucid serve` with several models, and `pellucid ps` and `pellucid stop`, through the built program.

use std::io::{Read, Write};
use std::net::TcpStream;
use std::path::Path;
use std::time::Duration;

use serde_json::Value;

use crate::serve::Served;
use crate::support::Home;
use crate::support::tiny_model::TEMPLATE;

/// Writes tiny models into a folder of a home, and returns its path.
pub(crate) fn folder_of(home: &Home, names: &[&str]) -> String {
    let folder = home.path().join("models");
    names.iter().for_each(|name| pellucid_testing::tiny_model(&folder.join(name), Some(TEMPLATE)));
    folder.to_str().unwrap().to_owned()
}

fn chat(served: &Served, model: &str) -> (u16, Value) {
    let messages = r#"[{"role": "user", "content": "hello"}]"#;
    let body = format!(r#"{{"model": "{model}", "messages": {messages}, "max_tokens": 8, "temperature": 0}}"#);
    request(served, "POST /v1/chat/completions", &body)
}

fn request(served: &Served, route: &str, body: &str) -> (u16, Value) {
    let mut stream = TcpStream::connect(&served.address).unwrap();
    stream.set_read_timeout(Some(Duration::from_secs(60))).unwrap();
    write!(
        stream,
        "{route} HTTP/1.1\r\nHost: {}\r\nConnection: close\r\nAuthorization: Bearer a-long-secret\r\n\
         Content-Type: application/json\r\nContent-Length: {}\r\n\r\n{body}",
        served.address,
        body.len()
    )
    .unwrap();
    let mut reply = String::new();
    stream.read_to_string(&mut reply).unwrap();
    let status = reply.split(' ').nth(1).unwrap().parse().unwrap();
    let (start, end) = (reply.find('{').unwrap(), reply.rfind('}').unwrap());
    (status, serde_json::from_str(&reply[start..=end]).unwrap_or_else(|_| panic!("{reply}")))
}

fn states(home: &Home, url: &str) -> Vec<(String, String)> {
    let listed = home.run(&["ps", "--json", "--url", url, "--api-key", "a-long-secret"]);
    let rows: Value = serde_json::from_str(listed.ok()).unwrap();
    let text = |value: &Value| value.as_str().unwrap().to_owned();
    rows.as_array().unwrap().iter().map(|row| (text(&row["name"]), text(&row["state"]))).collect()
}

#[test]
fn a_folder_is_served_and_its_models_are_listed_and_stopped() {
    let home = Home::new();
    let folder = folder_of(&home, &["alpha", "beta"]);
    std::fs::write(Path::new(&folder).join("broken.gguf"), b"GGUF but not really").unwrap();
    let flags = ["--model", &folder, "--device", "cpu", "--context", "128", "--max-models", "1"];
    let mut served = Served::start(&home, &flags, &[("PELLUCID_API_KEY", "a-long-secret")]);
    assert!(served.start_up.contains("this model of the folder is not served"), "{}", served.start_up);
    assert!(served.start_up.contains("memory: up to "), "{}", served.start_up);
    assert!(served.next_line("loading this model").contains("alpha"));
    assert!(served.next_line("this model is loaded on demand").contains("beta"));
    assert!(served.next_line("ready").contains("alpha"));
    let url = format!("http://{}", served.address);
    let state = |name: &str, state: &str| (name.to_owned(), state.to_owned());
    assert_eq!(states(&home, &url), [state("alpha", "ready"), state("beta", "unloaded")]);
    let (status, first) = chat(&served, "alpha");
    assert_eq!((status, &first["model"]), (200, &"alpha".into()), "{first}");
    let (status, second) = chat(&served, "beta");
    assert_eq!((status, &second["choices"]), (200, &first["choices"]), "the files are the same");
    assert_eq!(states(&home, &url), [state("alpha", "unloaded"), state("beta", "ready")]);
    let table = home.run(&["ps", "--url", &url, "--api-key", "a-long-secret"]);
    assert!(table.ok().starts_with("NAME ") && table.ok().contains("beta   ready"), "{table:?}");
    let row = |name: &str| table.ok().lines().find(|line| line.starts_with(name)).unwrap().split_whitespace().nth(2);
    assert_eq!(row("alpha"), Some("-"), "it takes no memory: {table:?}");
    assert_ne!(row("beta"), Some("-"), "{table:?}");
    let stopped = home.run(&["stop", "beta", "--url", &url, "--api-key", "a-long-secret"]);
    assert_eq!(stopped.ok(), "beta is unloaded\n");
    assert_eq!(states(&home, &url), [state("alpha", "unloaded"), state("beta", "unloaded")]);
    assert_eq!(chat(&served, "beta").1["choices"], second["choices"], "loaded again, it replies the same");
    assert_eq!(chat(&served, "gamma").0, 404);
    let unknown = home.run(&["stop", "gamma", "--url", &url, "--api-key", "a-long-secret"]);
    assert!(unknown.error().contains("answers 404: the model \"gamma\" does not exist"), "{unknown:?}");
    let keyless = home.run(&["ps", "--url", &url]);
    assert!(keyless.error().contains("answers 401: missing API key"), "{keyless:?}");
    served.terminate();
    let (status, log) = served.ended();
    assert_eq!(status, Some(143), "{log}");
    assert!(log.contains("every reply was finished"), "{log}");
    let gone = home.run(&["ps", "--url", &url]);
    assert!(gone.error().contains("no server answers at http://127.0.0.1:"), "{gone:?}");
}

#[test]
fn a_model_that_does_not_fit_is_refused_with_the_numbers() {
    let home = Home::new();
    let folder = folder_of(&home, &["alpha", "beta"]);
    let [alpha, beta] = ["alpha", "beta"].map(|name| format!("{folder}/{name}"));
    let flags = ["--model", &alpha, "--model", &beta, "--device", "cpu", "--max-memory", "1kB"];
    let served = Served::start(&home, &flags, &[("PELLUCID_API_KEY", "a-long-secret")]);
    let (status, refused) = chat(&served, "alpha");
    assert_eq!((status, &refused["error"]["code"]), (503, &"model_does_not_fit".into()), "{refused}");
    let message = refused["error"]["message"].as_str().unwrap();
    assert!(
        message.contains("can never be loaded: it needs ") && message.contains("--max-memory allows 1.0 kB for all"),
        "{message}"
    );
    served.terminate();
    served.ended();
}

#[test]
fn flags_of_a_single_model_are_refused_with_several() {
    let home = Home::new();
    let folder = folder_of(&home, &["alpha"]);
    for (flag, value) in [("--alias", "x"), ("--served-model-name", "x")] {
        let refused = home.run(&["serve", "--model", &folder, flag, value]);
        let message = format!("{flag} is for a server with a single model that is always loaded");
        assert!(refused.usage().contains(&message), "{refused:?}");
    }
    let twice = home.run(&["serve", "--model", &format!("{folder}/alpha"), "--model", &folder]);
    assert!(twice.usage().contains("two models are called \"alpha\""), "{twice:?}");
    let empty = home.path().join("empty");
    std::fs::create_dir(&empty).unwrap();
    let refused = home.run(&["serve", "--model", empty.to_str().unwrap()]);
    assert!(refused.usage().contains("this folder has no model"), "{refused:?}");
    let refused = home.run(&["ps", "--url", "127.0.0.1:8000"]);
    assert!(refused.usage().contains("--url: expected an address"), "{refused:?}");
    let refused = home.run(&["serve", "--model", &folder, "--keep-alive", "soon"]);
    assert!(refused.usage().contains("expected a duration such as 5m"), "{refused:?}");
}

#[test]
fn models_are_called_as_the_flags_say() {
    let home = Home::new();
    let folder = folder_of(&home, &["alpha", "beta"]);
    let [small, large] = ["small,gpt-4o-mini=", "large="].map(|names| {
        let file = if names.starts_with("small") { "alpha" } else { "beta" };
        format!("{names}{folder}/{file}")
    });
    let flags = ["--model", &small, "--model", &large, "--device", "cpu", "--context", "128"];
    let served = Served::start(&home, &flags, &[("PELLUCID_API_KEY", "a-long-secret")]);
    let url = format!("http://{}", served.address);
    let names: Vec<String> = states(&home, &url).into_iter().map(|(name, _)| name).collect();
    assert_eq!(names, ["small", "large"]);
    for (name, id) in [("small", "small"), ("gpt-4o-mini", "small"), ("large", "large")] {
        let (status, reply) = chat(&served, name);
        assert_eq!((status, &reply["model"]), (200, &id.into()), "{reply}");
    }
    assert_eq!(chat(&served, "alpha").0, 404);
    served.terminate();
    served.ended();
    // A single model has them too.
    let served =
        Served::start(&home, &["--model", &small, "--device", "cpu"], &[("PELLUCID_API_KEY", "a-long-secret")]);
    assert_eq!(chat(&served, "gpt-4o-mini").1["model"], "small");
    served.terminate();
    served.ended();
    let twice = home.run(&["serve", "--model", &small, "--model", &format!("small={folder}/beta")]);
    assert!(twice.usage().contains("two models are called \"small\""), "{twice:?}");
    let many = home.run(&["serve", "--model", &format!("all={folder}")]);
    assert!(many.usage().contains("a folder of models"), "{many:?}");
}

#[test]
fn models_have_settings_and_a_pulled_model_is_served_at_once() {
    let home = Home::new();
    let folder = folder_of(&home, &["alpha", "beta"]);
    let file = home.path().join("settings.toml");
    std::fs::write(home.path().join("chat.jinja"), "{{ messages[0].content }}").unwrap();
    let path = file.to_str().unwrap();
    std::fs::write(&file, "[beta]\ncontext = 64\ntemperature = 0.5\nchat-template = \"chat.jinja\"\n").unwrap();
    let flags = ["--model", &folder, "--device", "cpu", "--context", "128", "--model-settings", path];
    let served = Served::start(&home, &flags, &[("PELLUCID_API_KEY", "a-long-secret")]);
    let [alpha, beta] = ["alpha", "beta"].map(|name| {
        assert_eq!(chat(&served, name).0, 200);
        request(&served, &format!("GET /v1/models/{name}"), "").1
    });
    assert_eq!((&alpha["max_model_len"], &beta["max_model_len"]), (&128.into(), &64.into()));
    assert_eq!(beta["sampling_defaults"]["temperature"]["value"], 0.5, "{beta}");
    assert_ne!(alpha["system_fingerprint"], beta["system_fingerprint"], "the template is another one");
    // A model that is pulled is served without a restart, under the name by which it was pulled.
    assert_eq!(chat(&served, "tiny").0, 404);
    let pulled = request(&served, "POST /api/pull", r#"{"model": "tiny", "stream": false}"#);
    assert_eq!(pulled, (200, serde_json::json!({ "status": "success" })));
    assert_eq!(chat(&served, "tiny").1["model"], "tiny");
    served.terminate();
    served.ended();
    for (text, part) in
        [("[gamma]\ncontext = 64", "there is no model \"gamma\""), ("[beta]\nport = 1", "no such setting")]
    {
        std::fs::write(&file, text).unwrap();
        let refused = home.run(&["serve", "--model", &folder, "--device", "cpu", "--model-settings", path]);
        assert!(refused.usage().contains(part), "{refused:?}");
    }
}
