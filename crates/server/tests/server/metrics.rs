//! `/metrics`: the format that `Accept` prefers, and help and type of every family in both.

use std::collections::HashMap;

use crate::support::{Response, Server};

const OPEN_METRICS: &str = "application/openmetrics-text; version=1.0.0; charset=utf-8";
const TEXT: &str = "text/plain; version=0.0.4; charset=utf-8";

fn scrape(server: &Server, accept: Option<&str>) -> Response {
    let headers: Vec<(&str, &str)> = accept.map(|accept| ("Accept", accept)).into_iter().collect();
    server.request("GET", "/metrics", &headers, b"")
}

#[test]
fn the_client_chooses_the_format() {
    let server = Server::start();
    let prometheus = "application/openmetrics-text;version=1.0.0,application/openmetrics-text;version=0.0.1;q=0.75,\
                      text/plain;version=0.0.4;q=0.5,*/*;q=0.1";
    for (accept, expected) in [
        (None, TEXT),
        (Some("*/*"), TEXT),
        (Some("text/plain"), TEXT),
        (Some("text/plain;version=0.0.4;q=0.5,*/*;q=0.1"), TEXT),
        (Some("application/openmetrics-text;q=0.1,text/plain;q=0.2"), TEXT),
        (Some("application/openmetrics-text"), OPEN_METRICS),
        (Some(prometheus), OPEN_METRICS),
    ] {
        let reply = scrape(&server, accept);
        assert_eq!((reply.status, reply.header("content-type")), (200, Some(expected)), "{accept:?}");
        assert_eq!(reply.header("vary"), Some("accept"));
        assert_eq!(reply.text().ends_with("# EOF\n"), expected == OPEN_METRICS, "{accept:?}");
    }
}

/// Checks that each sample belongs to a family that was announced before it. Returns the samples by name and labels.
fn check(text: &str, is_open_metrics: bool) -> HashMap<String, f64> {
    let (mut helps, mut kinds, mut samples) = (HashMap::new(), HashMap::new(), HashMap::new());
    for line in text.lines().filter(|line| *line != "# EOF") {
        let mut words = line.splitn(4, ' ');
        match (words.next(), words.next(), words.next(), words.next()) {
            (Some("#"), Some("HELP"), Some(name), Some(help)) => {
                assert!(!help.is_empty() && helps.insert(name, help).is_none(), "{line}");
            }
            (Some("#"), Some("TYPE"), Some(name), Some(kind)) => {
                assert!(helps.contains_key(name), "{name} has no help");
                assert!(kinds.insert(name, kind).is_none(), "{line}");
            }
            _ => {
                let (series, value) = line.rsplit_once(' ').unwrap();
                let name = series.split('{').next().unwrap();
                let base = name.strip_suffix("_total").filter(|_| is_open_metrics);
                let parts = ["_bucket", "_sum", "_count"].iter().filter_map(|suffix| name.strip_suffix(suffix));
                let family = base.into_iter().chain([name]).chain(parts).find(|name| kinds.contains_key(name));
                let family = family.unwrap_or_else(|| panic!("{line} belongs to no family"));
                assert_eq!(kinds[family] == "counter", name.ends_with("_total"), "{line}");
                let value = value.parse().unwrap_or_else(|_| panic!("{line}"));
                assert!(samples.insert(series.to_owned(), value).is_none(), "{line} occurs twice");
            }
        }
    }
    samples
}

#[test]
fn every_family_has_help_and_type_in_both_formats() {
    let server = Server::start();
    server.chat("").ok();
    let text = check(&scrape(&server, None).text(), false);
    let open_metrics = check(&scrape(&server, Some("application/openmetrics-text")).text(), true);
    for name in [
        "vllm:num_requests_waiting",
        "vllm:num_requests_running",
        "vllm:kv_cache_usage_perc",
        "vllm:gpu_cache_usage_perc",
        "vllm:prompt_tokens_total",
        "vllm:generation_tokens_total",
        "vllm:num_preemptions_total",
        "vllm:prefix_cache_queries_total",
        "vllm:prefix_cache_hits_total",
        "vllm:request_prefill_time_seconds_count",
    ] {
        assert!(text.contains_key(&format!("{name}{{model_name=\"tiny\"}}")), "{name}");
    }
    assert!(text["vllm:generation_tokens_total{model_name=\"tiny\"}"] > 0.0, "the control: a reply was counted");
    assert!(text["vllm:prefix_cache_queries_total{model_name=\"tiny\"}"] > 0.0, "its prompt was looked up");
    let blocks = text["pellucid_kv_blocks"];
    let info: Vec<&String> = text.keys().filter(|name| name.starts_with("vllm:cache_config_info{")).collect();
    let [cache] = info[..] else { panic!("one line of sizes: {info:?}") };
    assert!(cache.contains(&format!("num_gpu_blocks=\"{blocks}\"")) && cache.contains("block_size=\"32\""), "{cache}");
    assert!(text.keys().any(|name| name.starts_with("vllm:lora_requests_info{") && name.contains("max_lora=\"0\"")));
    assert_eq!(text["pellucid_prefill_seconds_count"], 1.0);
    assert!(text["pellucid_prefill_seconds_sum"] > 0.0);
    // A scrape counts itself for the next one.
    let names = |samples: &HashMap<String, f64>| {
        let mut names: Vec<String> = samples.keys().filter(|name| !name.contains("/metrics")).cloned().collect();
        names.sort();
        names
    };
    assert_eq!(names(&text), names(&open_metrics));
}

#[test]
fn a_model_tells_the_size_of_a_block_by_which_memory_is_counted() {
    let server = Server::start();
    server.complete(&format!("\"prompt\":\"{}\",\"max_tokens\":1", "a".repeat(100))).ok();
    server.until("pellucid_kv_blocks_in_use", 0.0);
    let block = server.get("/v1/models/tiny").ok()["kv_block"].clone();
    let samples = check(&scrape(&server, None).text(), false);
    let blocks = samples["pellucid_kv_blocks_idle"];
    assert_eq!(blocks, (100 / block["positions"].as_u64().unwrap()) as f64, "whole blocks stay in the prefix cache");
    let bytes: f64 = (samples.iter())
        .filter(|(series, _)| series.starts_with("pellucid_tenant_kv_bytes{"))
        .map(|(_, bytes)| bytes)
        .sum();
    assert_eq!(bytes, blocks * block["bytes"].as_f64().unwrap());
}
