//! Models that come while the server runs.

use pellucid_server::{FindModels, ModelPuller, PullReport};

use super::*;

/// Finds the models that a test puts into it.
#[derive(Debug, Default)]
struct Later(Mutex<Vec<ServedModel>>);

impl FindModels for Later {
    fn find_new(&self) -> Vec<ServedModel> {
        std::mem::take(&mut self.0.lock().unwrap())
    }
}

/// Downloads nothing.
#[derive(Debug)]
struct NothingToPull;

impl ModelPuller for NothingToPull {
    fn check(&self, _: &str) -> Result<(), String> {
        Ok(())
    }

    fn pull(&self, _: &str, _: PullReport) -> Result<(), String> {
        Ok(())
    }
}

#[test]
fn a_pulled_model_is_served_without_a_restart() {
    let later = Arc::<Later>::default();
    let rights = TenantConfig { pull: true, metrics: true, ..tenant("a", "key-of-a") };
    let several = Several {
        models: vec![MODEL],
        tenants: vec![rights],
        finder: Some(later.clone()),
        max_loaded: Some(1),
        ..Several::default()
    };
    let server = several.start_with(Some(Arc::new(NothingToPull)), |model| {
        // A model whose name is taken is left out.
        later.0.lock().unwrap().extend([model(MODEL), model(WORDS)]);
    });
    let post = |path: &str, body: Value| server.post_as("key-of-a", path, &body.to_string());
    let chat = |model: &str| {
        let messages = json!([{ "role": "user", "content": "hello" }]);
        post("/v1/chat/completions", json!({ "model": model, "messages": messages, "max_tokens": 4 }))
    };
    assert_eq!(chat(WORDS).status, 404);
    assert_eq!(post("/api/pull", json!({ "model": "o/r", "stream": false })).status, 200);
    assert_eq!(json_of(&chat(WORDS))["model"], WORDS);
    assert_eq!(json_of(&chat(MODEL))["model"], MODEL);
    assert_eq!(json_of(&chat("words-alias"))["model"], WORDS);
    let headers = [("Authorization", "Bearer key-of-a")];
    let listed = json_of(&server.request("GET", "/v1/models", &headers, b""));
    let names: Vec<&Value> = listed["data"].as_array().unwrap().iter().map(|card| &card["id"]).collect();
    assert_eq!(names, [MODEL, "tiny-alias", WORDS, "words-alias"]);
    let metrics = server.request("GET", "/metrics", &headers, b"").text();
    assert!(metrics.contains("pellucid_generated_tokens_total{model=\"words\"}"), "{metrics}");
    assert!(metrics.contains("pellucid_model_memory_bytes{model=\"words\"} 1000000\n"), "{metrics}");
}
