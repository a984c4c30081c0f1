//! Requests that wait for a model: until it is loaded, or until others have made way; bounded, and in order.

use super::*;

#[test]
fn a_request_waits_until_the_requests_of_the_other_model_have_ended() {
    let server = holding(1, &[MODEL, WORDS]);
    until_state(&server, MODEL, "ready");
    server.hold_steps();
    let waiting = |model: &str| {
        let models = json_of(&server.get("/v1/models"));
        let card = models["data"].as_array().unwrap().iter().find(|card| card["id"] == model).unwrap().clone();
        card["pellucid"]["waiting"].as_u64().unwrap()
    };
    let until_waiting = |model: &str, expected: u64| {
        for _ in 0..1000 {
            if waiting(model) == expected {
                return;
            }
            std::thread::sleep(Duration::from_millis(5));
        }
        panic!("{} requests wait for {model}", waiting(model));
    };
    std::thread::scope(|scope| {
        let ask = |model: &'static str| {
            let server = &server;
            scope.spawn(move || text(&ask(server, model)))
        };
        let running = ask(MODEL);
        server.until("pellucid_sequences_running", 1.0);
        let first = ask(WORDS);
        until_waiting(WORDS, 1);
        // A later request for the loaded model does not overtake the one that waits.
        let later = ask(MODEL);
        until_waiting(MODEL, 1);
        let second = ask(WORDS);
        until_waiting(WORDS, 2);
        server.release_steps();
        assert_eq!(running.join().unwrap(), alone(MODEL));
        assert_eq!((first.join().unwrap(), second.join().unwrap()), (alone(WORDS), alone(WORDS)));
        assert_eq!(later.join().unwrap(), alone(MODEL));
    });
    // Each model was loaded for all requests that waited for it: the first at start, the other, the first again.
    let metrics = server.get("/metrics").text();
    assert!(metrics.contains("pellucid_model_load_seconds_count 3\n"), "{metrics}");
}

#[test]
fn requests_wait_for_a_model_that_is_being_loaded() {
    let plan = Arc::<Plan>::default();
    let gate = plan.gate.lock().unwrap();
    let server = Several { plan: plan.clone(), models: vec![MODEL], max_waiting: 2, ..Several::default() }.start();
    until_state(&server, MODEL, "loading");
    // The loader tells its progress a moment after the model is shown as loading.
    let progress = || json_of(&server.get("/v1/models/tiny"))["pellucid"]["progress"].clone();
    let is_told = (0..1000).any(|_| {
        std::thread::sleep(Duration::from_millis(10));
        progress() == 0.5
    });
    assert!(is_told, "the progress is {}", progress());
    let send = || {
        let headers = [("Content-Type", "application/json")];
        server.send("POST", "/v1/chat/completions", &headers, chat_body("\"temperature\":0").as_bytes())
    };
    let until_waiting = |expected: usize| {
        let waiting = || json_of(&server.get("/v1/models/tiny"))["pellucid"]["waiting"].clone();
        let is_reached = (0..1000).any(|_| {
            std::thread::sleep(Duration::from_millis(10));
            waiting() == expected
        });
        assert!(is_reached, "{} requests wait instead of {expected}", waiting());
    };
    let (first, second) = (send(), send());
    until_waiting(2);
    let refused = ask(&server, MODEL);
    assert_eq!((refused.status, &json_of(&refused)["error"]["code"]), (429, &json!("queue_full")));
    // A client that disconnects no longer waits.
    drop(second);
    until_waiting(1);
    drop(gate);
    assert_eq!(text(&Response::read(&mut BufReader::new(first))), alone(MODEL));
    assert_eq!(plan.num_loads.load(Ordering::SeqCst), 1, "all requests wait for the same load");
}

#[test]
fn one_tenant_cannot_fill_the_queue_of_a_model_that_is_being_loaded() {
    let plan = Arc::<Plan>::default();
    let gate = plan.gate.lock().unwrap();
    let watcher = TenantConfig { metrics: true, ..tenant("watcher", "key-of-watcher") };
    let tenants = vec![tenant("a", "key-of-a"), tenant("b", "key-of-b"), watcher];
    let several = Several { plan: plan.clone(), models: vec![MODEL], max_waiting: 4, tenants, ..Several::default() };
    let server = several.start();
    let send = |key: &str| {
        let headers = [("Content-Type", "application/json"), ("Authorization", &format!("Bearer {key}"))];
        server.send("POST", "/v1/chat/completions", &headers, chat_body("\"temperature\":0").as_bytes())
    };
    let until_waiting = |expected: usize| {
        let headers = [("Authorization", "Bearer key-of-watcher")];
        let card = || json_of(&server.request("GET", "/v1/models/tiny", &headers, b""));
        let is_reached = (0..1000).any(|_| {
            std::thread::sleep(Duration::from_millis(5));
            card()["pellucid"]["waiting"] == expected
        });
        assert!(is_reached, "{}", card());
    };
    let read = |stream| Response::read(&mut BufReader::new(stream));
    let a = [send("key-of-a"), send("key-of-a")];
    until_waiting(2);
    // Half of the four places is the share of a tenant.
    assert_eq!(read(send("key-of-a")).refused(429).1.as_deref(), Some("queue_full"));
    let b = send("key-of-b");
    until_waiting(3);
    drop(gate);
    let replies = a.into_iter().chain([b]).map(|stream| text(&read(stream)));
    assert_eq!(replies.collect::<Vec<_>>(), vec![alone(MODEL); 3]);
}
