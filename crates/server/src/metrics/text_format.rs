//! Prometheus' text format 0.0.4, made from the OpenMetrics text that the library writes.
//!
//! The formats differ in three points: a counter's family has the suffix `_total` of its samples, there are no `# UNIT`
//! lines, and there is no `# EOF`. Exemplars and `_created` samples do not occur in this server's metrics.

/// Returns OpenMetrics text in the text format 0.0.4.
pub(super) fn from_open_metrics(open_metrics: &str) -> String {
    let mut text = String::with_capacity(open_metrics.len());
    // The type, which decides the family's name, comes after the help.
    let mut help: Option<(&str, &str)> = None;
    for line in open_metrics.lines() {
        let Some(comment) = line.strip_prefix("# ") else {
            text.push_str(line);
            text.push('\n');
            continue;
        };
        let mut words = comment.splitn(3, ' ');
        match (words.next(), words.next(), words.next()) {
            (Some("HELP"), Some(name), Some(words)) => help = Some((name, words)),
            (Some("TYPE"), Some(name), Some(kind)) => {
                let suffix = if kind == "counter" { "_total" } else { "" };
                if let Some((_, words)) = help.take().filter(|(of, _)| *of == name) {
                    text.push_str(&format!("# HELP {name}{suffix} {words}\n"));
                }
                text.push_str(&format!("# TYPE {name}{suffix} {kind}\n"));
            }
            // `# UNIT` and `# EOF`.
            _ => {}
        }
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn counters_are_called_like_their_samples() {
        let open_metrics = "# HELP a Tokens.\n# TYPE a counter\na_total{x=\"# TYPE\"} 1\n# HELP b_seconds Time.\n\
                            # TYPE b_seconds histogram\n# UNIT b_seconds seconds\nb_seconds_sum 0.5\n\
                            # TYPE c gauge\nc 2\n# EOF\n";
        let expected = "# HELP a_total Tokens.\n# TYPE a_total counter\na_total{x=\"# TYPE\"} 1\n\
                        # HELP b_seconds Time.\n# TYPE b_seconds histogram\nb_seconds_sum 0.5\n\
                        # TYPE c gauge\nc 2\n";
        assert_eq!(from_open_metrics(open_metrics), expected);
    }
}
