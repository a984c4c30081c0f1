//! Content negotiation: which of several formats a request's `Accept` header prefers.

use axum::http::{HeaderMap, header};

/// A format that a route can answer in.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Offer {
    /// The media type, such as `text/plain`.
    pub(crate) kind: &'static str,
    /// Value of the parameter `version`, which a client may require.
    pub(crate) version: Option<&'static str>,
}

/// A media range of an `Accept` header, in lower case.
struct Range {
    kind: String,
    version: Option<String>,
    /// From 0 to 1; 0 is "not acceptable".
    quality: f32,
}

/// Returns the index of the offer that the client prefers. Without a preference it is the first; so it is when nothing
/// on offer is acceptable, because an answer in another format is of more use than none.
pub(crate) fn preferred(headers: &HeaderMap, offers: &[Offer]) -> usize {
    let lines = headers.get_all(header::ACCEPT).iter().filter_map(|line| line.to_str().ok());
    let ranges: Vec<Range> = lines.flat_map(|line| line.split(',')).filter_map(Range::parse).collect();
    if ranges.is_empty() {
        return 0;
    }
    let mut best = (0, 0.0);
    for (i, offer) in offers.iter().enumerate() {
        // The most specific range decides. Of equally specific ones the last would be as good as the first.
        let range = ranges.iter().filter_map(|range| Some((range.specificity(offer)?, range.quality)));
        let quality = range.max_by_key(|(specificity, _)| *specificity).map_or(0.0, |(_, quality)| quality);
        if quality > best.1 {
            best = (i, quality);
        }
    }
    best.0
}

impl Range {
    /// Parses one range; `None` if its form is not valid.
    fn parse(text: &str) -> Option<Range> {
        let mut parts = text.split(';').map(str::trim);
        let kind = parts.next().filter(|kind| kind.contains('/'))?.to_ascii_lowercase();
        let mut range = Range { kind, version: None, quality: 1.0 };
        for part in parts {
            let (name, value) = part.split_once('=')?;
            let value = value.trim().trim_matches('"');
            match name.trim().to_ascii_lowercase().as_str() {
                "q" => range.quality = value.parse().ok().filter(|quality| (0.0..=1.0).contains(quality))?,
                "version" => range.version = Some(value.to_owned()),
                // `charset` and `escaping` do not select between the formats here.
                _ => {}
            }
        }
        Some(range)
    }

    /// Returns how closely the range describes an offer; `None` if it does not.
    fn specificity(&self, offer: &Offer) -> Option<u8> {
        if self.kind == "*/*" {
            return Some(0);
        }
        if let Some(family) = self.kind.strip_suffix("/*") {
            return offer.kind.split('/').next().filter(|own| *own == family).map(|_| 1);
        }
        match (&self.version, offer.version) {
            _ if self.kind != offer.kind => None,
            (Some(wanted), Some(version)) => (wanted == version).then_some(3),
            _ => Some(2),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const OFFERS: [Offer; 2] = [
        Offer { kind: "text/plain", version: Some("0.0.4") },
        Offer { kind: "application/openmetrics-text", version: Some("1.0.0") },
    ];

    fn choice(accept: &[&str]) -> &'static str {
        let headers = accept.iter().map(|line| (header::ACCEPT, line.parse().unwrap())).collect();
        OFFERS[preferred(&headers, &OFFERS)].kind
    }

    #[test]
    fn the_highest_quality_wins() {
        // As Prometheus 2.42 and 3 send it.
        let prometheus = "application/openmetrics-text;version=1.0.0,application/openmetrics-text;version=0.0.1;q=0.75,\
                          text/plain;version=0.0.4;q=0.5,*/*;q=0.1";
        let newer = "application/vnd.google.protobuf;proto=io.prometheus.client.MetricFamily;encoding=delimited;q=0.7,\
                     application/openmetrics-text;version=1.0.0;escaping=allow-utf-8;q=0.6,\
                     text/plain;version=0.0.4;q=0.4,*/*;q=0.2";
        for accept in [
            prometheus,
            newer,
            "application/openmetrics-text",
            "Application/OpenMetrics-Text; Version=1.0.0",
            "application/*",
            "text/plain;q=0.1, application/openmetrics-text;q=0.2",
            "text/plain;version=1.0.0;q=0.9, application/openmetrics-text;q=0.2",
        ] {
            assert_eq!(choice(&[accept]), "application/openmetrics-text", "{accept}");
        }
        for accept in [
            "*/*",
            "text/plain",
            "text/*;q=0.5",
            "text/plain;version=0.0.4",
            "text/plain, application/openmetrics-text",
            "text/plain;q=0.3, application/openmetrics-text;version=1.0.0;q=0.2",
            "application/openmetrics-text;version=2.0.0, text/plain;q=0.1",
            "*/*, application/openmetrics-text;q=0",
            "image/png",
            "nonsense",
            "",
            "application/openmetrics-text;q=2",
        ] {
            assert_eq!(choice(&[accept]), "text/plain", "{accept}");
        }
        assert_eq!(choice(&[]), "text/plain");
        assert_eq!(choice(&["text/plain;q=0.5", "application/openmetrics-text"]), "application/openmetrics-text");
    }
}
