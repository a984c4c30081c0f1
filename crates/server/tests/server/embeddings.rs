//! `/v1/embeddings` and `/v1/rerank`, with a tiny encoder.

use crate::support::embedder::{DIMENSIONS, SHORTER, VECTORS, tokenizer};
use crate::support::{MODEL, Purpose, Server, Setup, chat_body, tenant};
use serde_json::{Value, json};

fn server(purpose: Purpose) -> Server {
    Server::with(Setup { purpose, ..Setup::default() })
}

fn embed(server: &Server, fields: Value) -> Value {
    let mut body = json!({ "model": VECTORS });
    body.as_object_mut().unwrap().extend(fields.as_object().unwrap().clone());
    server.post("/v1/embeddings", &body.to_string()).ok()
}

fn vector(value: &Value) -> Vec<f32> {
    value.as_array().unwrap().iter().map(|value| value.as_f64().unwrap() as f32).collect()
}

fn length(vector: &[f32]) -> f32 {
    vector.iter().map(|value| value * value).sum::<f32>().sqrt()
}

#[test]
fn each_text_gets_its_vector_whatever_else_is_in_the_request() {
    let server = server(Purpose::Vectors);
    let texts = ["a cat", "the dog barks", "0123456789", "a cat"];
    let list = embed(&server, json!({ "input": texts }));
    assert_eq!((&list["object"], &list["model"]), (&json!("list"), &json!(VECTORS)));
    // A token for each letter, and two around each text.
    let tokens: usize = texts.iter().map(|text| 2 + text.chars().filter(|c| *c != ' ').count()).sum();
    assert_eq!(list["usage"], json!({ "prompt_tokens": tokens, "total_tokens": tokens }));
    let data = list["data"].as_array().unwrap();
    assert_eq!(data.len(), texts.len());
    for (index, (object, text)) in data.iter().zip(texts).enumerate() {
        assert_eq!((&object["object"], &object["index"]), (&json!("embedding"), &json!(index)));
        let alone = embed(&server, json!({ "input": text }));
        assert_eq!(alone["data"][0]["embedding"], object["embedding"], "{text}");
        let vector = vector(&object["embedding"]);
        assert_eq!(vector.len(), DIMENSIONS);
        assert!((length(&vector) - 1.0).abs() < 1e-6);
    }
    assert_ne!(data[0]["embedding"], data[1]["embedding"]);
    assert_eq!(data[0]["embedding"], data[3]["embedding"]);
}

#[test]
fn token_ids_base64_and_shorter_vectors_are_the_same_values() {
    let server = server(Purpose::Vectors);
    let tokenizer = tokenizer();
    let ids = [tokenizer.prefix(), &tokenizer.encode("a cat"), tokenizer.suffix()].concat();
    let plain = embed(&server, json!({ "input": "a cat" }))["data"][0]["embedding"].clone();
    assert_eq!(embed(&server, json!({ "input": ids }))["data"][0]["embedding"], plain);
    assert_eq!(embed(&server, json!({ "input": [ids, [2, 3]] }))["data"][0]["embedding"], plain);
    let text = embed(&server, json!({ "input": "a cat", "encoding_format": "base64" }));
    let text = text["data"][0]["embedding"].as_str().unwrap().to_owned();
    // Every four characters are three bytes; the 192 bytes of a vector need no padding.
    let digit = |c: u8| match c {
        b'A'..=b'Z' => c - b'A',
        b'a'..=b'z' => c - b'a' + 26,
        b'0'..=b'9' => c - b'0' + 52,
        b'+' => 62,
        b'/' => 63,
        other => panic!("{other}"),
    };
    let bytes: Vec<u8> = text
        .as_bytes()
        .chunks_exact(4)
        .flat_map(|chunk| {
            let bits = chunk.iter().fold(0u32, |bits, &c| bits << 6 | u32::from(digit(c)));
            [(bits >> 16) as u8, (bits >> 8) as u8, bits as u8]
        })
        .collect();
    let decoded: Vec<f32> = bytes.chunks_exact(4).map(|value| f32::from_le_bytes(value.try_into().unwrap())).collect();
    assert_eq!(decoded, vector(&plain));
    let raw = vector(&embed(&server, json!({ "input": "a cat", "normalize": false }))["data"][0]["embedding"]);
    assert!((length(&raw) - 1.0).abs() > 0.1);
    let shorter = embed(&server, json!({ "input": "a cat", "dimensions": SHORTER }));
    let shorter = vector(&shorter["data"][0]["embedding"]);
    assert_eq!(shorter.len(), SHORTER);
    let scale = length(&raw[..SHORTER]);
    for (value, raw) in shorter.iter().zip(&raw) {
        assert!((value - raw / scale).abs() < 1e-6, "shortened before it is normalised");
    }
    let cut = embed(&server, json!({ "input": "abcdefgh", "truncate_prompt_tokens": 5 }));
    assert_eq!(cut["usage"]["prompt_tokens"], 5);
    assert_eq!(cut["data"][0]["embedding"], embed(&server, json!({ "input": "abc" }))["data"][0]["embedding"]);
    let long = "a ".repeat(500);
    assert_eq!(embed(&server, json!({ "input": long, "truncate_prompt_tokens": -1 }))["usage"]["prompt_tokens"], 128);
}

#[test]
fn wrong_requests_are_refused_by_name() {
    let server = server(Purpose::Vectors);
    let cases = [
        (json!({ "input": "" }), 400, "input", "invalid_value"),
        (json!({ "input": [] }), 400, "input", "invalid_value"),
        (json!({ "input": ["a", ""] }), 400, "input", "invalid_value"),
        (json!({ "input": [[]] }), 400, "input", "invalid_value"),
        (json!({ "input": 5 }), 400, "input", "invalid_type"),
        (json!({ "input": ["a", 5] }), 400, "input", "invalid_type"),
        (json!({ "input": vec!["a"; 2049] }), 400, "input", "array_above_max_length"),
        (json!({ "input": [1, 96] }), 400, "input[0]", "out_of_range"),
        (json!({ "input": ["a", "b ".repeat(200)] }), 400, "input[1]", "context_length_exceeded"),
        (json!({}), 400, "input", "missing_required_parameter"),
        (json!({ "input": "a", "dimensions": SHORTER + 1 }), 400, "dimensions", "invalid_value"),
        (json!({ "input": "a", "dimensions": 0 }), 400, "dimensions", "out_of_range"),
        (json!({ "input": "a", "encoding_format": "hex" }), 400, "encoding_format", "invalid_value"),
        (json!({ "input": "a", "truncate_prompt_tokens": 2 }), 400, "truncate_prompt_tokens", "out_of_range"),
        (json!({ "input": "a", "colour": "blue" }), 400, "colour", "unknown_parameter"),
        (json!({ "input": "a", "model": "none" }), 404, "model", "model_not_found"),
    ];
    for (fields, status, param, code) in cases {
        let mut body = json!({ "model": VECTORS });
        body.as_object_mut().unwrap().extend(fields.as_object().unwrap().clone());
        let reply = server.post("/v1/embeddings", &body.to_string());
        let error = reply.json()["error"].clone();
        assert_eq!((reply.status, &error["param"], &error["code"]), (status, &json!(param), &json!(code)), "{fields}");
    }
    let reply = server.post("/v1/embeddings", &json!({ "model": VECTORS, "input": "a", "dimensions": 17 }).to_string());
    assert!(reply.json()["error"]["message"].as_str().unwrap().contains("48 or one of 16"));
}

#[test]
fn a_server_does_what_its_models_can() {
    let chat = chat_body("\"max_tokens\":1");
    let vectors = json!({ "model": VECTORS, "input": "a" }).to_string();
    for purpose in [Purpose::Text, Purpose::Vectors, Purpose::Both] {
        let server = server(purpose);
        let (chats, embeds) = (purpose != Purpose::Vectors, purpose != Purpose::Text);
        for (path, body, does) in [("/v1/chat/completions", &chat, chats), ("/v1/embeddings", &vectors, embeds)] {
            let reply = server.post(path, body);
            assert_eq!(reply.status == 200, does, "{purpose:?} {path}: {}", reply.json());
            if !does {
                let error = &reply.json()["error"];
                assert_eq!(error["code"], "model_not_supported");
                assert!(error["message"].as_str().unwrap().contains(path), "{error}");
            }
        }
        let models = server.get("/v1/models").ok();
        let capabilities: Vec<&Value> =
            models["data"].as_array().unwrap().iter().map(|card| &card["capabilities"]).collect();
        let (text, vector) = (json!(["chat", "completions"]), json!(["embeddings", "rerank"]));
        // The encoder has an alias.
        let expected = match purpose {
            Purpose::Text => vec![&text],
            Purpose::Vectors => vec![&vector; 2],
            Purpose::Both => vec![&text, &vector, &vector],
        };
        assert_eq!(capabilities, expected);
        let paths = server.get("/openapi.json").ok()["paths"].clone();
        assert_eq!(paths.get("/v1/chat/completions").is_some(), chats);
        assert_eq!(paths.get("/v1/embeddings").is_some(), embeds);
        for path in ["/", "/docs", "/health", "/ready", "/metrics"] {
            assert_eq!(server.get(path).status, 200, "{purpose:?} {path}");
        }
    }
    let server = server(Purpose::Both);
    let card = server.get(&format!("/v1/models/{VECTORS}")).ok();
    assert_eq!(card["embedding"], json!({ "dimensions": DIMENSIONS, "shorter": [SHORTER], "pooling": "mean" }));
    assert_eq!(card["max_model_len"], 128);
    // Each route has its own model.
    let body = json!({ "model": MODEL, "input": "a" }).to_string();
    let refused = server.post("/v1/embeddings", &body);
    assert_eq!((refused.status, &refused.json()["error"]["code"]), (400, &json!("model_not_supported")));
}

#[test]
fn documents_are_ordered_by_the_cosine_of_their_vectors() {
    let server = server(Purpose::Vectors);
    let rerank = |fields: Value| {
        let documents = json!(["zebra 99", "a cat", { "text": "a car" }, "a cat"]);
        let mut body = json!({ "model": VECTORS, "query": "a cat", "documents": documents });
        body.as_object_mut().unwrap().extend(fields.as_object().unwrap().clone());
        server.post("/v1/rerank", &body.to_string())
    };
    let reply = rerank(json!({})).ok();
    assert_eq!(reply["scoring"], "cosine");
    let results = reply["results"].as_array().unwrap();
    let order: Vec<u64> = results.iter().map(|result| result["index"].as_u64().unwrap()).collect();
    assert_eq!(order[..2], [1, 3], "equal documents in their order");
    assert_eq!(results[0]["relevance_score"], 1.0);
    assert_eq!(results[0]["document"]["text"], "a cat");
    let scores: Vec<f64> = results.iter().map(|result| result["relevance_score"].as_f64().unwrap()).collect();
    assert!(scores.is_sorted_by(|a, b| a >= b), "{scores:?}");
    let texts = embed(&server, json!({ "input": ["a cat", "zebra 99"] }));
    let [cat, zebra] = [0, 1].map(|index| vector(&texts["data"][index]["embedding"]));
    let cosine: f32 = cat.iter().zip(&zebra).map(|(a, b)| a * b).sum();
    let of_zebra = results.iter().find(|result| result["index"] == 0).unwrap();
    assert!((of_zebra["relevance_score"].as_f64().unwrap() as f32 - cosine).abs() < 1e-6);
    let short = rerank(json!({ "top_n": 1, "return_documents": false })).ok();
    assert_eq!(short["results"].as_array().unwrap().len(), 1);
    assert_eq!(short["results"][0].get("document"), None);
    for (fields, param) in [
        (json!({ "query": "" }), "query"),
        (json!({ "documents": [] }), "documents"),
        (json!({ "documents": ["a", ""] }), "documents[1]"),
        (json!({ "documents": [{ "text": "a", "title": "b" }] }), "documents[0].title"),
        (json!({ "top_n": 0 }), "top_n"),
    ] {
        let reply = rerank(fields);
        assert_eq!((reply.status, reply.json()["error"]["param"].clone()), (400, json!(param)));
    }
}

#[test]
fn ollama_clients_get_the_same_vectors() {
    let server = server(Purpose::Vectors);
    let expected = embed(&server, json!({ "input": ["a cat", "the dog"] }));
    let body = json!({ "model": format!("{VECTORS}:latest"), "input": ["a cat", "the dog"], "options": {} });
    let reply = server.post("/api/embed", &body.to_string()).ok();
    assert_eq!(reply["model"], VECTORS);
    assert_eq!(reply["prompt_eval_count"], expected["usage"]["prompt_tokens"]);
    for index in 0..2 {
        assert_eq!(reply["embeddings"][index], expected["data"][index]["embedding"]);
    }
    let long = json!({ "model": VECTORS, "input": "a ".repeat(500) });
    assert_eq!(server.post("/api/embed", &long.to_string()).ok()["prompt_eval_count"], 128, "cut by default");
    let mut refused = long.clone();
    refused["truncate"] = json!(false);
    assert_eq!(server.post("/api/embed", &refused.to_string()).status, 400);
    let unknown = json!({ "model": VECTORS, "input": "a", "options": { "temperature": 1 } });
    let reply = server.post("/api/embed", &unknown.to_string());
    assert!(reply.status == 400 && reply.json()["error"].as_str().unwrap().contains("options.temperature"));
    // Token ids are OpenAI's: Ollama has texts only.
    for input in [json!([2, 3]), json!([[2, 3]]), json!(["a", 5])] {
        let reply = server.post("/api/embed", &json!({ "model": VECTORS, "input": input }).to_string());
        let error = reply.json()["error"].as_str().unwrap_or_default().to_owned();
        assert!(reply.status == 400 && error.contains("a list of strings"), "{input}: {error}");
    }
}

#[test]
fn ollama_clients_find_a_model_that_computes_vectors() {
    let server = server(Purpose::Vectors);
    let tags = server.get("/api/tags").ok();
    assert_eq!(tags["models"][0]["name"], VECTORS);
    assert_eq!(server.get("/api/ps").ok()["models"][0]["name"], VECTORS);
    assert!(server.get("/api/version").ok()["version"].is_string());
    let shown = server.post("/api/show", &json!({ "model": format!("{VECTORS}:latest") }).to_string()).ok();
    assert_eq!(shown["capabilities"], json!(["embedding"]));
    let family = shown["model_info"]["general.architecture"].as_str().unwrap();
    assert!(!family.is_empty(), "{shown}");
    assert_eq!(shown["model_info"][format!("{family}.embedding_length")], DIMENSIONS);
    assert_eq!(shown["model_info"][format!("{family}.context_length")], 128);
    assert_eq!(server.post("/api/show", r#"{"model": "none"}"#).status, 404);
    let unknown = server.post("/api/show", &json!({ "model": VECTORS, "colour": 1 }).to_string());
    assert!(unknown.status == 400 && unknown.json()["error"].as_str().unwrap().contains("colour"));
}

#[test]
fn texts_are_charged_to_their_tenant() {
    let mut limited = tenant("limited", "key-of-limited");
    limited.tokens_per_minute = Some(10);
    limited.metrics = true;
    let server = Server::with(Setup {
        purpose: Purpose::Vectors,
        tenants: vec![limited, tenant("other", "key-of-other")],
        ..Setup::default()
    });
    let body = json!({ "model": VECTORS, "input": "abcdefghij" }).to_string();
    assert_eq!(server.post("/v1/embeddings", &body).status, 401);
    assert_eq!(server.post_as("key-of-limited", "/v1/embeddings", &body).status, 200, "the last tokens of the minute");
    let refused = server.post_as("key-of-limited", "/v1/embeddings", &body);
    assert_eq!((refused.status, &refused.json()["error"]["code"]), (429, &json!("tokens_per_minute")));
    assert_eq!(server.post_as("key-of-other", "/v1/embeddings", &body).status, 200);
    let metrics = server.request("GET", "/metrics", &[("Authorization", "Bearer key-of-limited")], b"");
    let text = String::from_utf8(metrics.body).unwrap();
    for line in ["tenant=\"limited\",outcome=\"completed\"} 1", "tenant=\"other\",outcome=\"completed\"} 1"] {
        assert!(text.contains(line), "{text}");
    }
}

/// The document and the parser have the same fields and ranges.
#[test]
fn the_document_agrees_with_the_parser() {
    let server = server(Purpose::Vectors);
    let schemas = server.get("/openapi.json").ok()["components"]["schemas"].clone();
    let embeddings = json!({ "model": VECTORS, "input": "a" });
    let rerank = json!({ "model": VECTORS, "query": "a", "documents": ["b"] });
    for (name, path, base) in [
        ("EmbeddingRequest", "/v1/embeddings", embeddings.clone()),
        ("RerankRequest", "/v1/rerank", rerank),
        ("OllamaEmbedRequest", "/api/embed", embeddings),
    ] {
        let schema = &schemas[name];
        assert_eq!(schema["additionalProperties"], json!({ "type": "null" }));
        let required = schema["required"].as_array().unwrap();
        assert_eq!(required.len(), base.as_object().unwrap().len(), "{required:?}");
        for (field, shape) in schema["properties"].as_object().unwrap() {
            let ask = |value: Value| {
                let mut body = base.clone();
                body[field] = value;
                let reply = server.post(path, &body.to_string());
                let error = if reply.status == 200 { Value::Null } else { reply.json()["error"].clone() };
                // Ollama's errors are a text.
                let is_own =
                    error["param"] == field.as_str() || error.as_str().is_some_and(|text| text.contains(field));
                (reply.status, is_own, error.to_string())
            };
            let (status, _, error) = ask(Value::Null);
            assert!(!error.contains("unknown"), "{field}");
            assert_eq!(status == 200, !required.contains(&json!(field)), "{field}: null means absent");
            let (Some(low), Some(high)) = (shape["minimum"].as_i64(), shape["maximum"].as_i64()) else { continue };
            for outside in [low - 1, high + 1] {
                let (status, is_own, _) = ask(json!(outside));
                assert!(status == 400 && is_own, "{field}: {outside} is outside {low} to {high}");
            }
        }
        let example = &schema["examples"][0];
        assert_eq!(server.post(path, &example.to_string()).status, 200, "{example}");
    }
}
