//! Serves the WorkerService: requests of the engine, and the state and events of its ranks for resyncs.

use std::collections::BTreeMap;
use std::pin::Pin;
use std::sync::Arc;

use kvrouter_core::publisher::CHUNK_BLOCKS;
use prost::Message;
use tokio_stream::Stream;
use tonic::{Code, Request, Response, Status};

use crate::config::Config;
use crate::contract::worker_service_server::WorkerService;
use crate::contract::{
    AbortRequest, AbortResponse, ErrorInfo, ErrorReason, GetEventsRequest, GetEventsResponse, GetLoadRequest,
    GetLoadResponse, GetModelFileRequest, GetModelFileResponse, GetRankStateRequest, GetRankStateResponse,
    KvEventBatch, WorkerServiceGenerateRequest,
};
use crate::loads::Loads;
use crate::rank::Rank;
use crate::refusal::{bad_request, refusal};
use crate::requests::{OutputStream, Requests};

type Responses<T> = Pin<Box<dyn Stream<Item = Result<T, Status>> + Send>>;

/// The service of one worker.
pub struct Server {
    pub config: Arc<Config>,
    pub ranks: BTreeMap<u32, Arc<Rank>>,
    pub requests: Arc<Requests>,
    pub loads: Arc<Loads>,
}

impl Server {
    fn rank(&self, dp_rank: u32) -> Result<&Arc<Rank>, Status> {
        self.ranks.get(&dp_rank).ok_or_else(|| {
            let info = ErrorInfo {
                field: "dp_rank".into(),
                advice: "Send one of its ranks.".into(),
                known_values: self.ranks.keys().take(16).map(u32::to_string).collect(),
                ..Default::default()
            };
            let message = format!("this worker has no rank {dp_rank}");
            refusal(Code::NotFound, ErrorReason::UnknownWorker, &message, info)
        })
    }
}

#[tonic::async_trait]
impl WorkerService for Server {
    type GenerateStream = OutputStream;
    type GetRankStateStream = Responses<GetRankStateResponse>;
    type GetEventsStream = Responses<GetEventsResponse>;
    type GetModelFileStream = Responses<GetModelFileResponse>;

    async fn generate(
        &self,
        request: Request<WorkerServiceGenerateRequest>,
    ) -> Result<Response<Self::GenerateStream>, Status> {
        let request = request.into_inner();
        if !self.config.serves_requests {
            let info = ErrorInfo {
                advice: "Send requests to the engine's own address.".into(),
                retry_elsewhere: true,
                ..Default::default()
            };
            let message = "this worker publishes the cache of an engine and serves no requests";
            return Err(refusal(Code::FailedPrecondition, ErrorReason::BadRequest, message, info));
        }
        self.rank(request.dp_rank)?;
        if request.token_ids.is_empty() {
            return Err(bad_request("token_ids", "the prompt is empty", "Send at least one token id."));
        }
        if request.stop_conditions.as_ref().is_none_or(|stop| stop.max_tokens == 0) {
            let field = "stop_conditions.max_tokens";
            return Err(bad_request(field, "max_tokens is 0", "Set max_tokens to 1 or more."));
        }
        Ok(Response::new(self.requests.start(request)?))
    }

    async fn abort(&self, request: Request<AbortRequest>) -> Result<Response<AbortResponse>, Status> {
        let aborted = self.requests.abort(&request.into_inner().request_ids) as u32;
        Ok(Response::new(AbortResponse { aborted }))
    }

    async fn get_rank_state(
        &self,
        request: Request<GetRankStateRequest>,
    ) -> Result<Response<Self::GetRankStateStream>, Status> {
        let rank = self.rank(request.into_inner().dp_rank)?.clone();
        // Copying and sorting a large rank takes a while.
        let chunks = tokio::task::spawn_blocking(move || rank.snapshot().into_chunks(CHUNK_BLOCKS))
            .await
            .map_err(|error| Status::internal(error.to_string()))?;
        let decoded = chunks.map(|chunk| {
            GetRankStateResponse::decode(chunk.as_slice()).map_err(|error| Status::internal(error.to_string()))
        });
        Ok(Response::new(Box::pin(tokio_stream::iter(decoded))))
    }

    async fn get_events(&self, request: Request<GetEventsRequest>) -> Result<Response<Self::GetEventsStream>, Status> {
        let request = request.into_inner();
        let rank = self.rank(request.dp_rank)?;
        let start = request.start.unwrap_or_default();
        let gone = |message: &str| {
            let info = ErrorInfo {
                field: "start".into(),
                advice: "Fetch the rank's state instead.".into(),
                ..Default::default()
            };
            refusal(Code::OutOfRange, ErrorReason::Unspecified, message, info)
        };
        if start.incarnation != rank.head.incarnation {
            let (expected, received) = (rank.head.incarnation, start.incarnation);
            return Err(gone(&format!("expected a cursor of incarnation {expected}, received {received}")));
        }
        let until = request.until_event_id.unwrap_or_default();
        let batches = rank.events_since(start.next_event_id, until).map_err(|error| gone(&error.to_string()))?;
        let decoded = batches.map(|batch| {
            let batch = KvEventBatch::decode(batch.as_slice()).map_err(|error| Status::internal(error.to_string()))?;
            Ok(GetEventsResponse { batch: Some(batch) })
        });
        Ok(Response::new(Box::pin(tokio_stream::iter(decoded))))
    }

    async fn get_model_file(
        &self,
        _request: Request<GetModelFileRequest>,
    ) -> Result<Response<Self::GetModelFileStream>, Status> {
        let info = ErrorInfo {
            field: "sha256".into(),
            advice: "Ask for a file that the worker registers, or ask another worker.".into(),
            ..Default::default()
        };
        Err(refusal(Code::NotFound, ErrorReason::Unspecified, "this worker has no model files", info))
    }

    async fn get_load(&self, _request: Request<GetLoadRequest>) -> Result<Response<GetLoadResponse>, Status> {
        Ok(Response::new(GetLoadResponse {
            reports: self.loads.latest(),
            model: self.config.model.clone(),
            block_size: Some(self.config.block_size),
            ..Default::default()
        }))
    }
}
