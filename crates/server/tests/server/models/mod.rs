//! Several models in one server: chosen by name, loaded on demand within the memory for all, unloaded when others need
//! it, and never while a request uses them.

mod additions;
mod waiting;

use std::io::BufReader;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use pellucid_server::{
    FindModels, KeepAlive, LoadModel, ModelPuller, ModelSource, OpenModel, Purpose, ServedModel, ServedModels,
    SharedTenants, TenantConfig,
};
use pellucid_testing::TinyModel;
use serde_json::{Value, json};

use crate::support::embedder::{self, VECTORS};
use crate::support::{CONTEXT, Faults, LOST_DEVICE, MODEL, Response, Server, Setup, chat_body, tenant};

const WORDS: &str = "words";
const THIRD: &str = "third";
/// Planned memory of every model of these tests.
const BYTES: u64 = 1_000_000;

/// Loads a tiny model, as the program would load one from its files.
#[derive(Debug)]
struct Tiny {
    id: &'static str,
    tenants: SharedTenants,
    faults: FaultsOf,
    plan: Arc<Plan>,
}

#[derive(Clone)]
struct FaultsOf(Arc<Faults>);

impl std::fmt::Debug for FaultsOf {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("FaultsOf")
    }
}

/// How the loads of a test go.
#[derive(Debug, Default)]
struct Plan {
    /// Models that are loaded now, and the most that were at the same time.
    num_loads: AtomicUsize,
    is_broken: AtomicBool,
    panics: AtomicBool,
    /// While locked, loads stand still at half of the weights.
    gate: Mutex<()>,
}

impl LoadModel for Tiny {
    fn load(&self, mut on_progress: Box<dyn FnMut(f32) + Send>) -> Result<OpenModel, String> {
        self.plan.num_loads.fetch_add(1, Ordering::SeqCst);
        on_progress(0.5);
        drop(self.plan.gate.lock().unwrap_or_else(std::sync::PoisonError::into_inner));
        if self.plan.is_broken.load(Ordering::SeqCst) {
            return Err("/models/secret/path.gguf: this file is broken".into());
        }
        assert!(!self.plan.panics.load(Ordering::SeqCst), "this loader panics");
        if self.id == VECTORS {
            return Ok(OpenModel::Vectors(Arc::new(embedder::load(32))));
        }
        let tiny = TinyModel { has_words: self.id == WORDS, ..TinyModel::default() };
        let setup = Setup { tiny, model_id: self.id, aliases: vec![format!("{}-alias", self.id)], ..Setup::default() };
        Ok(OpenModel::Text(Arc::new(setup.load(&self.tenants, self.faults.0.clone()))))
    }
}

/// Settings of a test's server.
struct Several {
    models: Vec<&'static str>,
    max_memory_bytes: Option<u64>,
    max_loaded: Option<usize>,
    keep_alive: KeepAlive,
    tenants: Vec<TenantConfig>,
    max_waiting: usize,
    plan: Arc<Plan>,
    finder: Option<Arc<dyn FindModels>>,
}

impl Default for Several {
    fn default() -> Several {
        Several {
            models: vec![MODEL, WORDS],
            max_memory_bytes: None,
            max_loaded: None,
            keep_alive: KeepAlive::Forever,
            tenants: Vec::new(),
            max_waiting: 8,
            plan: Arc::default(),
            finder: None,
        }
    }
}

impl Several {
    fn start(self) -> Server {
        self.start_with(None, |_| ())
    }

    /// Starts a server that pulls models with `puller`. Passes a function that makes models of it to `prepare`.
    fn start_with(
        self,
        puller: Option<Arc<dyn ModelPuller>>,
        prepare: impl FnOnce(&dyn Fn(&'static str) -> ServedModel),
    ) -> Server {
        let mut setup = Setup { tenants: self.tenants, puller, ..Setup::default() };
        let tenants = setup.shared_tenants();
        let options = setup.options(&tenants);
        let faults = Arc::<Faults>::default();
        let model = |id: &'static str| ServedModel {
            id: id.to_owned(),
            aliases: if id == VECTORS { vec!["text-embedding-3-small".into()] } else { vec![format!("{id}-alias")] },
            purpose: if id == VECTORS { Purpose::Vectors } else { Purpose::Text },
            memory_bytes: if id == "huge" { 100 * BYTES } else { BYTES },
            device: "a device for tests".into(),
            details: Default::default(),
            context_len: CONTEXT,
            has_template: true,
            source: ModelSource::OnDemand(Box::new(Tiny {
                id,
                tenants: tenants.clone(),
                faults: FaultsOf(faults.clone()),
                plan: self.plan.clone(),
            })),
        };
        prepare(&model);
        let models = ServedModels {
            models: self.models.iter().map(|id| model(id)).collect(),
            max_memory_bytes: self.max_memory_bytes,
            max_loaded: self.max_loaded,
            max_waiting: self.max_waiting,
            keep_alive: self.keep_alive,
            finder: self.finder,
        };
        Server::run(models, options, tenants, faults)
    }
}

/// Starts a server whose memory holds `num_models` of the models.
fn holding(num_models: u64, models: &[&'static str]) -> Server {
    Several { models: models.to_vec(), max_memory_bytes: Some(num_models * BYTES), ..Several::default() }.start()
}

fn ask(server: &Server, model: &str) -> Response {
    server.chat(&format!("\"model\":\"{model}\",\"temperature\":0"))
}

fn text(response: &Response) -> String {
    let value: Value = serde_json::from_slice(&response.body).unwrap();
    assert_eq!(response.status, 200, "{value}");
    value["choices"][0]["message"]["content"].as_str().unwrap().to_owned()
}

fn json_of(response: &Response) -> Value {
    serde_json::from_slice(&response.body).unwrap_or_else(|_| panic!("{:?}", String::from_utf8_lossy(&response.body)))
}

fn state(server: &Server, model: &str) -> Value {
    json_of(&server.get(&format!("/v1/models/{model}")))["pellucid"]["state"].clone()
}

#[track_caller]
fn until_state(server: &Server, model: &str, expected: &str) {
    for _ in 0..1000 {
        if state(server, model) == expected {
            return;
        }
        std::thread::sleep(Duration::from_millis(10));
    }
    panic!("{model} is still {}", state(server, model));
}

/// Replies of a server that has only this model.
fn alone(model: &'static str) -> String {
    let tiny = TinyModel { has_words: model == WORDS, ..TinyModel::default() };
    let server = Server::with(Setup { tiny, model_id: model, ..Setup::default() });
    text(&ask(&server, model))
}

#[test]
fn the_name_chooses_the_model() {
    let server = Several::default().start();
    for model in [MODEL, WORDS] {
        let reply = ask(&server, model);
        assert_eq!(json_of(&reply)["model"], model);
        assert_eq!(text(&reply), alone(model));
        assert_eq!(text(&ask(&server, &format!("{model}-alias"))), text(&reply));
    }
    assert_ne!(text(&ask(&server, MODEL)), text(&ask(&server, WORDS)), "the models must differ");
    let unknown = ask(&server, "gpt-4o");
    let message =
        "the model \"gpt-4o\" does not exist; this server has \"tiny\", \"tiny-alias\", \"words\", \"words-alias\"";
    assert_eq!((unknown.status, &json_of(&unknown)["error"]["message"]), (404, &json!(message)));
    assert_eq!(json_of(&unknown)["error"]["code"], "model_not_found");
}

#[test]
fn every_api_chooses_its_model() {
    let server = Several::default().start();
    for model in [MODEL, WORDS] {
        let messages = json!([{ "role": "user", "content": "hello" }]);
        let post = |path: &str, body: Value| {
            let headers = [("Content-Type", "application/json"), ("anthropic-version", "2023-06-01")];
            let reply = server.request("POST", path, &headers, body.to_string().as_bytes());
            assert_eq!(reply.status, 200, "{path}: {}", String::from_utf8_lossy(&reply.body));
            json_of(&reply)
        };
        let chat = post("/v1/chat/completions", json!({ "model": model, "messages": messages, "max_tokens": 4 }));
        assert_eq!(chat["model"], model);
        let message = post("/v1/messages", json!({ "model": model, "messages": messages, "max_tokens": 4 }));
        assert_eq!(message["model"], model);
        let response = post("/v1/responses", json!({ "model": model, "input": "hello", "max_output_tokens": 4 }));
        assert_eq!(response["model"], model);
        let ollama = json!({ "model": format!("{model}:latest"), "messages": messages, "stream": false,
            "options": { "num_predict": 4 } });
        assert_eq!(post("/api/chat", ollama)["model"], model);
        let content = post("/completion", json!({ "model": model, "prompt": "hello", "n_predict": 4 }));
        assert_eq!(content["model"], model);
        let tokens = post("/tokenize", json!({ "model": model, "prompt": "HELLO" }));
        assert!(tokens["count"].as_u64().unwrap() > 0, "{tokens}");
        let shown = post("/api/show", json!({ "model": model }));
        assert!(shown["capabilities"].is_array());
    }
    // A request that may name no model gets the first.
    let first = server.post("/completion", r#"{"prompt": "hello", "n_predict": 4}"#);
    assert_eq!(json_of(&first)["model"], MODEL);
    assert_eq!(json_of(&server.get("/props"))["model_alias"], MODEL);
    let tags = json_of(&server.get("/api/tags"));
    let names: Vec<&Value> = tags["models"].as_array().unwrap().iter().map(|model| &model["name"]).collect();
    assert_eq!(names, [MODEL, "tiny-alias", WORDS, "words-alias"]);
}

#[test]
fn the_least_recently_used_model_is_unloaded() {
    let server = holding(2, &[MODEL, WORDS, THIRD]);
    // The first two fit at start.
    until_state(&server, MODEL, "ready");
    until_state(&server, WORDS, "ready");
    assert_eq!(state(&server, THIRD), "unloaded");
    text(&ask(&server, WORDS));
    text(&ask(&server, MODEL));
    text(&ask(&server, THIRD));
    assert_eq!([MODEL, WORDS, THIRD].map(|model| state(&server, model)), ["ready", "unloaded", "ready"]);
    text(&ask(&server, WORDS));
    assert_eq!([MODEL, WORDS, THIRD].map(|model| state(&server, model)), ["unloaded", "ready", "ready"]);
    let metrics = server.get("/metrics").text();
    assert!(metrics.contains("pellucid_models_loaded 2\n"), "{metrics}");
    assert!(metrics.contains("pellucid_model_unloads_total{model=\"words\",reason=\"memory\"} 1\n"), "{metrics}");
    assert!(metrics.contains("pellucid_model_memory_bytes{model=\"tiny\"} 0\n"), "{metrics}");
    assert!(metrics.contains("pellucid_model_memory_bytes{model=\"third\"} 1000000\n"), "{metrics}");
    assert!(metrics.contains("pellucid_model_load_seconds_count 4\n"), "{metrics}");
    assert!(metrics.contains("pellucid_generated_tokens_total{model=\"words\"} 16\n"), "{metrics}");
    assert!(metrics.contains("pellucid_steps_total{model=\"third\"}"), "{metrics}");
}

#[test]
fn a_reply_is_the_same_after_the_model_was_loaded_again() {
    let server = holding(1, &[MODEL, WORDS]);
    let before = text(&ask(&server, MODEL));
    text(&ask(&server, WORDS));
    assert_eq!(state(&server, MODEL), "unloaded");
    assert_eq!(text(&ask(&server, MODEL)), before);
    assert_eq!(before, alone(MODEL));
}

#[test]
fn a_model_with_requests_in_flight_is_not_unloaded() {
    let server = holding(1, &[MODEL, WORDS]);
    until_state(&server, MODEL, "ready");
    server.hold_steps();
    std::thread::scope(|scope| {
        let running = scope.spawn(|| text(&ask(&server, MODEL)));
        server.until("pellucid_sequences_running", 1.0);
        // It waits as long as the request allows.
        let mut body: Value = serde_json::from_str(&chat_body("\"max_tokens\":4,\"timeout_ms\":50")).unwrap();
        body["model"] = json!(WORDS);
        let refused = server.post("/v1/chat/completions", &body.to_string());
        let error = &json_of(&refused)["error"];
        assert_eq!((refused.status, &error["code"]), (503, &json!("model_does_not_fit")), "{error}");
        let message = "the model \"words\" needs 1.0 MB of memory, but of the 1.0 MB for all models, 1.0 MB are in use \
                       by models that cannot be unloaded now";
        assert_eq!(error["message"], message);
        assert_eq!(refused.header("retry-after"), Some("1"));
        // To unload it now means to unload it when its request has ended.
        let unload = server.post("/models/unload", r#"{"model": "tiny"}"#);
        assert_eq!((unload.status, &json_of(&unload)["pellucid"]["state"]), (200, &json!("ready")));
        server.release_steps();
        assert_eq!(running.join().unwrap(), alone(MODEL));
    });
    until_state(&server, MODEL, "unloaded");
    text(&ask(&server, WORDS));
}

#[test]
fn a_model_larger_than_the_limit_is_refused_with_the_numbers() {
    let server = holding(2, &[MODEL, "huge"]);
    let refused = ask(&server, "huge");
    let error = &json_of(&refused)["error"];
    assert_eq!((refused.status, &error["code"]), (503, &json!("model_does_not_fit")));
    let message = error["message"].as_str().unwrap();
    let expected = "the model \"huge\" can never be loaded: it needs 100.0 MB of memory, and --max-memory allows 2.0 MB \
                    for all models";
    assert_eq!(message, expected);
    assert_eq!(refused.header("retry-after"), None, "another try would not help");
    text(&ask(&server, MODEL));
}

#[test]
fn keep_alive_of_a_request_decides_when_the_model_is_unloaded() {
    let server = Several::default().start();
    let chat = |keep_alive: Value| {
        let body = json!({ "model": MODEL, "messages": [{ "role": "user", "content": "hello" }], "stream": false,
            "options": { "num_predict": 4, "temperature": 0 }, "keep_alive": keep_alive });
        let reply = server.post("/api/chat", &body.to_string());
        assert_eq!(reply.status, 200, "{}", String::from_utf8_lossy(&reply.body));
        json_of(&reply)["message"]["content"].clone()
    };
    let kept = chat(json!("10m"));
    let card = json_of(&server.get("/v1/models/tiny"));
    assert!(card["pellucid"]["expires_at"].is_u64(), "{card}");
    assert_eq!(chat(json!(-1)), kept);
    assert_eq!(json_of(&server.get("/v1/models/tiny"))["pellucid"]["expires_at"], Value::Null);
    assert_eq!(chat(json!(0)), kept);
    until_state(&server, MODEL, "unloaded");
    assert_eq!(chat(json!("20ms")), kept);
    until_state(&server, MODEL, "unloaded");
    let loaded = server.post("/api/generate", r#"{"model": "tiny"}"#);
    assert_eq!(json_of(&loaded)["done_reason"], "load");
    assert_eq!(state(&server, MODEL), "ready");
    let running = json_of(&server.get("/api/ps"));
    assert!(running["models"].as_array().unwrap().iter().any(|model| model["name"] == MODEL), "{running}");
    let unloaded = server.post("/api/generate", r#"{"model": "tiny", "keep_alive": 0}"#);
    assert_eq!(json_of(&unloaded)["done_reason"], "unload");
    until_state(&server, MODEL, "unloaded");
}

#[test]
fn unused_models_are_unloaded_after_the_default_time() {
    let keep_alive = KeepAlive::For(Duration::from_millis(50));
    let server = Several { keep_alive, ..Several::default() }.start();
    text(&ask(&server, WORDS));
    until_state(&server, WORDS, "unloaded");
    until_state(&server, MODEL, "unloaded");
    assert!(
        server.get("/metrics").text().contains("pellucid_model_unloads_total{model=\"words\",reason=\"keep_alive\"}")
    );
}

#[test]
fn a_broken_file_fails_its_requests_and_nothing_else() {
    let plan = Arc::<Plan>::default();
    let server = Several { plan: plan.clone(), max_loaded: Some(1), ..Several::default() }.start();
    text(&ask(&server, MODEL));
    for breaks in [&plan.is_broken, &plan.panics] {
        breaks.store(true, Ordering::SeqCst);
        let failed = ask(&server, WORDS);
        let error = &json_of(&failed)["error"];
        assert_eq!((failed.status, &error["code"]), (503, &json!("model_load_failed")), "{error}");
        assert!(!error["message"].as_str().unwrap().contains("secret"), "paths are for the log: {error}");
        breaks.store(false, Ordering::SeqCst);
        text(&ask(&server, MODEL));
    }
    assert_eq!(text(&ask(&server, WORDS)), alone(WORDS), "a file that was mended is loaded");
    assert!(
        server.get("/metrics").text().contains("pellucid_model_loads_total{model=\"words\",result=\"failed\"} 2\n")
    );
}

#[test]
fn models_that_run_at_the_same_time_reply_as_alone() {
    let server = Several { models: vec![MODEL, WORDS, VECTORS], ..Several::default() }.start();
    let expected = [MODEL, WORDS].map(alone);
    let vector = || {
        let reply = server.post("/v1/embeddings", r#"{"model": "vectors", "input": "abc"}"#);
        assert_eq!(reply.status, 200, "{}", String::from_utf8_lossy(&reply.body));
        json_of(&reply)["data"][0]["embedding"].clone()
    };
    let first = vector();
    std::thread::scope(|scope| {
        for _ in 0..4 {
            for (model, expected) in [MODEL, WORDS].into_iter().zip(&expected) {
                let server = &server;
                scope.spawn(move || assert_eq!(&text(&ask(server, model)), expected));
            }
            scope.spawn(|| assert_eq!(vector(), first));
        }
    });
    // A model of the wrong purpose is refused by name.
    let refused = ask(&server, VECTORS);
    assert_eq!((refused.status, &json_of(&refused)["error"]["code"]), (400, &json!("model_not_supported")));
    let refused = server.post("/v1/embeddings", r#"{"model": "tiny", "input": "abc"}"#);
    assert_eq!((refused.status, &json_of(&refused)["error"]["code"]), (400, &json!("model_not_supported")));
}

#[test]
fn tenants_may_be_limited_to_models() {
    let limited = TenantConfig { models: Some(vec!["words-alias".into()]), ..tenant("limited", "key-of-limited") };
    let operator = TenantConfig { manage_models: true, ..tenant("operator", "key-of-operator") };
    let server = Several { tenants: vec![limited, operator], ..Several::default() }.start();
    let ask = |key: &str, model: &str| {
        server.post_as(key, "/v1/chat/completions", &chat_body(&format!("\"model\":\"{model}\"")))
    };
    assert_eq!(ask("key-of-limited", WORDS).status, 200);
    assert_eq!(ask("key-of-operator", MODEL).status, 200);
    let unknown = ask("key-of-limited", MODEL);
    let message = "the model \"tiny\" does not exist; this server has \"words\", \"words-alias\"";
    assert_eq!((unknown.status, &json_of(&unknown)["error"]["message"]), (404, &json!(message)));
    let get = |key: &str, path: &str| server.request("GET", path, &[("Authorization", &format!("Bearer {key}"))], b"");
    for path in ["/v1/models", "/models", "/api/tags", "/api/ps"] {
        let listed = get("key-of-limited", path);
        assert_eq!(listed.status, 200, "{path}");
        assert!(listed.text().contains("words") && !listed.text().contains("tiny"), "{path}: {}", listed.text());
        assert!(get("key-of-operator", path).text().contains("tiny"), "{path}");
    }
    assert_eq!(get("key-of-limited", "/v1/models/tiny").status, 404);
    assert!(!get("key-of-limited", "/openapi.json").text().contains("\"tiny\""));
    // A request that names no model gets the first that exists for the tenant.
    let first = server.post_as("key-of-limited", "/completion", r#"{"prompt": "hello", "n_predict": 4}"#);
    assert_eq!(json_of(&first)["model"], WORDS);
    // Loading and unloading needs a right.
    let refused = server.post_as("key-of-limited", "/models/unload", r#"{"model": "words"}"#);
    assert_eq!((refused.status, &json_of(&refused)["error"]["code"]), (403, &json!("manage_models_not_allowed")));
    let done = server.post_as("key-of-operator", "/models/unload", r#"{"model": "words"}"#);
    assert_eq!((done.status, &json_of(&done)["pellucid"]["state"]), (200, &json!("unloaded")));
    let done = server.post_as("key-of-operator", "/models/load", r#"{"model": "words"}"#);
    assert_eq!((done.status, &json_of(&done)["pellucid"]["state"]), (200, &json!("ready")));
    // A removed restriction holds at once.
    let free = [tenant("limited", "key-of-limited"), tenant("operator", "key-of-operator")];
    server.tenants.replace(free.into()).unwrap();
    assert_eq!(ask("key-of-limited", MODEL).status, 200);
}

#[test]
fn a_model_whose_engine_is_lost_is_loaded_again() {
    let server = Several { models: vec![MODEL], ..Several::default() }.start();
    let before = text(&ask(&server, MODEL));
    server.fail_with(LOST_DEVICE);
    assert_eq!(ask(&server, MODEL).status, 503);
    server.fail_with(0);
    let after = (0..100).map(|_| ask(&server, MODEL)).find(|reply| reply.status == 200);
    assert_eq!(text(&after.expect("the model is loaded again")), before);
    assert_eq!(server.get("/health").status, 200);
}

#[test]
fn a_fixed_model_cannot_be_unloaded() {
    let server = Server::start();
    let refused = server.post("/models/unload", r#"{"model": "tiny"}"#);
    assert_eq!((refused.status, &json_of(&refused)["error"]["code"]), (409, &json!("model_not_on_demand")));
    let card = json_of(&server.get("/v1/models/tiny"));
    assert_eq!((&card["pellucid"]["state"], &card["pellucid"]["on_demand"]), (&json!("ready"), &json!(false)));
    let unknown = server.post("/models/load", r#"{"model": "other"}"#);
    assert_eq!(unknown.status, 404);
}
