//! Why a WebSocket is closed: the close code and the error message that the client receives, and the label that counts
//! it in the metrics.

use axum::http::StatusCode;

use crate::http::error::ApiError;

/// Why a WebSocket is closed.
#[derive(Debug, Clone, PartialEq)]
pub(super) enum CloseReason {
    /// The reply is complete, or the client cancelled it.
    Completed,
    /// The client sent a close frame, with this code.
    ByClient(Option<u16>),
    /// The connection failed, or the client closed it without a close frame.
    Disconnected,
    /// The client accepted no byte for the write timeout.
    SlowReader,
    /// The client answered no ping.
    NoPong,
    /// A frame violates the protocol, in the way described.
    Protocol(&'static str),
    /// A binary message.
    Binary,
    /// A text message or the reason of a close frame is not valid UTF-8.
    NotUtf8,
    /// A message is larger than the limit in bytes.
    TooLarge(usize),
    /// Control frames and empty fragments arrive faster than the limit.
    TooManyFrames,
    /// No request arrived in time, or not all of a message.
    Late(&'static str),
    /// A request was refused, or its reply failed.
    Refused(ApiError),
}

impl From<ApiError> for CloseReason {
    fn from(error: ApiError) -> CloseReason {
        CloseReason::Refused(error)
    }
}

impl CloseReason {
    /// Returns the code for the close frame; `None` if the client cannot receive one.
    pub(super) fn code(&self) -> Option<u16> {
        Some(match self {
            CloseReason::Completed => 1000,
            CloseReason::ByClient(code) => code.unwrap_or(1000),
            CloseReason::Disconnected | CloseReason::SlowReader | CloseReason::NoPong => return None,
            CloseReason::Protocol(_) => 1002,
            CloseReason::Binary => 1003,
            CloseReason::NotUtf8 => 1007,
            CloseReason::TooManyFrames | CloseReason::Late(_) => 1008,
            CloseReason::TooLarge(_) => 1009,
            CloseReason::Refused(error) => match (error.status, error.detail.code) {
                (_, Some("draining" | "shutting_down")) => 1001,
                (_, Some("engine_stopped" | "device_lost")) => 1011,
                (StatusCode::TOO_MANY_REQUESTS | StatusCode::SERVICE_UNAVAILABLE, _) => 1013,
                (StatusCode::PAYLOAD_TOO_LARGE, _) => 1009,
                (status, _) if status.is_server_error() => 1011,
                _ => 1008,
            },
        })
    }

    /// Returns the text for the close frame.
    pub(super) fn text(&self) -> &'static str {
        match self {
            CloseReason::Protocol(text) | CloseReason::Late(text) => text,
            CloseReason::Binary => "binary messages are not accepted",
            CloseReason::NotUtf8 => "the text is not valid UTF-8",
            CloseReason::TooLarge(_) => "the message is too large",
            CloseReason::TooManyFrames => "too many control frames or empty fragments",
            CloseReason::Refused(error) => error.detail.code.unwrap_or_default(),
            _ => "",
        }
    }

    /// Returns the error object that is sent before the close frame.
    pub(super) fn error(&self) -> Option<ApiError> {
        Some(match self {
            CloseReason::Refused(error) => error.clone(),
            CloseReason::Binary => ApiError::invalid("expected a text message, found a binary message"),
            CloseReason::TooLarge(limit) => {
                let message = format!("the message is larger than {limit} bytes");
                ApiError::refused(StatusCode::PAYLOAD_TOO_LARGE, "request_too_large", message)
            }
            CloseReason::Late(text) => ApiError::refused(StatusCode::REQUEST_TIMEOUT, "body_timeout", *text),
            _ => return None,
        })
    }

    /// Returns the label in the metrics.
    pub(super) fn label(&self) -> &'static str {
        match self {
            CloseReason::Completed => "completed",
            CloseReason::ByClient(_) => "client",
            CloseReason::Disconnected => "disconnected",
            CloseReason::SlowReader => "slow_reader",
            CloseReason::NoPong => "no_pong",
            CloseReason::Protocol(_) => "protocol",
            CloseReason::Binary => "binary",
            CloseReason::NotUtf8 => "invalid_utf8",
            CloseReason::TooLarge(_) => "too_large",
            CloseReason::TooManyFrames => "too_many_frames",
            CloseReason::Late(_) => "timeout",
            CloseReason::Refused(_) => match self.code() {
                Some(1001) => "shutdown",
                Some(1011) => "failed",
                Some(1013) => "limited",
                _ => "refused",
            },
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_refusal_has_the_code_of_its_cause() {
        for (error, code, label) in [
            (ApiError::invalid("wrong"), 1008, "refused"),
            (ApiError::too_many("queue_full", "full", 1), 1013, "limited"),
            (ApiError::unavailable("client_memory", "full", 1), 1013, "limited"),
            (ApiError::unavailable("draining", "soon", 1), 1001, "shutdown"),
            (ApiError::unavailable("shutting_down", "now", 1), 1001, "shutdown"),
            (ApiError::unavailable("device_lost", "gone", 30), 1011, "failed"),
            (ApiError::internal(), 1011, "failed"),
        ] {
            let reason = CloseReason::from(error);
            assert_eq!((reason.code(), reason.label()), (Some(code), label), "{reason:?}");
            assert!(reason.error().is_some());
        }
    }
}
